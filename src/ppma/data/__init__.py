"""Labelled images from where they lie: folders, archives, array files, and digits that come with the package."""
