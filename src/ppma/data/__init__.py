"""Data sets: folders, archives, array files, COCO, ADE20K, and digits embedded in the package."""
