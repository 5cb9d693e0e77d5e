"""Small tables derived from public data sets, and the script that derives them."""

from pathlib import Path

DOCUMENTS = Path(__file__).parent / "document_lengths.json"
ARRIVALS = Path(__file__).parent / "azure_conversation.json"
TOOLS = Path(__file__).parent / "toolbench_prefixes.json"
VIDEOS = Path(__file__).parent / "nextqa_prefixes.json"
