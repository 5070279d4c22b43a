"""Weight files: one reader and one writer.

| module | |
| --- | --- |
| `reader` | opens a file of any format once |
| `writer` | our format: safetensors with the configuration in the metadata |
| `release`, `openmmlab` | the authors' layouts in our names |
| `pickles` | files of `torch.save`, without running code |
| `weights` | names, shapes and values against a model |
"""

from ppma.models.checkpoints.reader import Checkpoint, open_checkpoint
from ppma.models.checkpoints.weights import CheckpointError
from ppma.models.checkpoints.writer import write_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint", "write_checkpoint"]
