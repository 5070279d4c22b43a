"""Tasks: what the engine trains. Each has a schema for its configuration files and a class that supplies the rest."""
