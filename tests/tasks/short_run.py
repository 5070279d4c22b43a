"""Changes of a recipe for a run of seconds."""

SHORT = ("epochs=null", "steps=3", "batch_size=8", "eval_steps=3", "data.test_split=null")
