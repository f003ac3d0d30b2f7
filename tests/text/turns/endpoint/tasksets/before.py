"""An environment of verifiers before 0.4."""


def load_environment():
    return None
