"""Training of EAGLE-3 drafts: data, features, training-time test, loss, DeepSpeed engine, loop."""
