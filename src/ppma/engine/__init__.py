"""The training engine: one loop for every task, on torchrun, DDP and timm's optimizers, schedules and EMA.

A task supplies model, data, loss and metrics (`ppma.engine.task`); the engine is independent of them.
"""
