"""Small tables derived from public data sets, and the script that derives them."""

from pathlib import Path

DOCUMENTS = Path(__file__).parent / "document_lengths.json"
ARRIVALS = Path(__file__).parent / "azure_conversation.json"
