"""Weight files: one reader and one writer.

| module | |
| --- | --- |
| `reader` | opens a file of any format, once |
| `writer` | writes our format: safetensors with the configuration in the metadata |
| `release`, `openmmlab` | layouts of the authors' files |
| `pickles` | reads files of `torch.save` without executing pickled code |
| `weights` | checks names, shapes and values against a model |
"""

from ppma.models.checkpoints.reader import Checkpoint, open_checkpoint
from ppma.models.checkpoints.weights import CheckpointError
from ppma.models.checkpoints.writer import write_checkpoint, write_half

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint", "write_checkpoint", "write_half"]
