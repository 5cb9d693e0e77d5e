"""Data sets: generated samples of our own text, and importers of the real files."""

from batchrun.datasets.importing import import_dataset
from batchrun.datasets.samples import write_sample
from batchrun.datasets.schemas import DATASET_NAMES
from batchrun.datasets.shapes import Scale
from batchrun.datasets.writer import WrittenDataset

__all__ = ["DATASET_NAMES", "Scale", "WrittenDataset", "import_dataset", "write_sample"]
