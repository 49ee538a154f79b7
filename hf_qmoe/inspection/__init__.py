"""What a checkpoint folder holds and takes in memory, known before any weight is read.

`skeleton` builds models without weights, `parts` sorts what they hold, `result` is what is said of them and how it is
printed, `folder` reads a folder and puts these together.
"""

from hf_qmoe.inspection.folder import inspect_checkpoint
from hf_qmoe.inspection.result import Inspection, InspectionError, PartSize, Size


__all__ = ["Inspection", "InspectionError", "PartSize", "Size", "inspect_checkpoint"]
