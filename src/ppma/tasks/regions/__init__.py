"""The regions task: colour every pixel like the dot of its region."""
