"""The training loop of text and control, and the protocols that its components implement (`protocol`); checkpoints of a
run, callbacks, evaluation, and asynchronous sampling (`ahead`)."""
