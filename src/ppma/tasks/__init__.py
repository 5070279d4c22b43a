"""The tasks that the engine trains: a configuration schema and a class for each."""
