"""Rules for the `data` section."""

from __future__ import annotations

from tether.config.keys import show
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, together
from tether.config.schema.root import RunConfig


def training_data_is_named(cfg: RunConfig) -> Problem | None:
    """There must be at least one training file."""
    if cfg.data.train_files and all(cfg.data.train_files):
        return None
    return Problem("data.train_files", "names no file", "give at least one file")


def validation_has_data(cfg: RunConfig) -> Problem | None:
    """Validation needs validation prompts."""
    asks = "trainer.val_only" if cfg.trainer.val_only else "trainer.test_freq" if cfg.trainer.test_freq > 0 else None
    if (cfg.data.val_files and all(cfg.data.val_files)) or asks is None:
        return None
    return Problem("data.val_files", f"empty, and {asks} asks for validation", "give data.val_files")


def subsets_are_not_empty(cfg: RunConfig) -> Problem | None:
    """A limit of 0 rows would drop all rows."""
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(cfg.data, name) == 0:
            return Problem(f"data.{name}", "0 leaves no row", "give a number above 0, or -1 for all rows")
    return None


def chat_template_is_jinja(cfg: RunConfig) -> Problem | None:
    """A chat template is the text of a template: without a variable or block, all prompts would be equal."""
    template = cfg.data.chat_template
    if template is None or "{{" in template or "{%" in template:
        return None
    how = 'give the text of a Jinja template, for example data.chat_template="$(cat template.jinja)"'
    return Problem("data.chat_template", f"{show(template)} has no {{{{ }}}} or {{% %}}", how)


DATA_RULES: tuple[Rule, ...] = (
    training_data_is_named,
    validation_has_data,
    together("data.custom_cls.path", "data.custom_cls.name"),
    together("data.custom_cls.name", "data.custom_cls.path"),
    subsets_are_not_empty,
    chat_template_is_jinja,
)
