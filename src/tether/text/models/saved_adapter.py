"""Checks the LoRA adapter that a model starts from by its config, before any weights are loaded. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tether.config import ADAPTER_CONFIG
from tether.config.schema import BackboneConfig
from tether.runtime.disk import COPY_AGAIN, check_readable, read_json
from tether.runtime.objects import is_object
from tether.spelling import ask
from tether.text.models.model_path import weight_files


def check_adapter(section: str, settings: BackboneConfig, base: Path | str | None = None) -> None:
    """Refuse a ``lora_adapter_path`` that has no adapter, or one of another size or for another model.

    Args:
        section: the section of the model, ``actor_rollout_ref.model`` or ``critic.model``.
        settings: its settings.
        base: location of the model that the adapter is for; None: not known yet.

    Raises:
        ValueError: the message names the key, the directory and the fix.
    """
    assert settings.lora_adapter_path is not None
    directory = Path(settings.lora_adapter_path).expanduser()
    named = f"{section}.lora_adapter_path={directory}"
    check_readable([directory])
    if not (directory / ADAPTER_CONFIG).is_file():
        what = f"holds no LoRA adapter (looked for {ADAPTER_CONFIG})" if directory.is_dir() else "no such directory"
        raise ValueError(f"{named}: {what}.{ask(str(file.parent) for file in directory.glob(f'*/{ADAPTER_CONFIG}'))}")
    config = read_json(directory / ADAPTER_CONFIG, dict, COPY_AGAIN)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{named}: is an adapter of the kind {config.get('peft_type')}. Take one of LoRA.")
    for key, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if (mine := getattr(settings, key)) != (theirs := config.get(name)):
            raise ValueError(f"{named}: has {name}={theirs}, and {section}.{key}={mine}. Leave {key} out.")
    theirs = config.get("base_model_name_or_path")
    if base is not None and theirs and not is_object(base) and _differ(theirs, base):
        raise ValueError(
            f"{named}: was trained on {theirs}, and {section}.path={base} is another model. Set {section}.path="
            f"{theirs}, or take an adapter of {base}."
        )


def _differ(theirs: str, base: Path | str) -> bool:
    """Whether two models differ, as far as their names or local weights show."""
    local = Path(theirs)
    if not local.is_dir():
        return isinstance(base, str) and theirs.count("/") == 1 and theirs.casefold() != base.casefold()
    if isinstance(base, str) or local.resolve() == base.resolve():
        return False
    from tether.checkpoints import sha256_of  # it loads torch, which most checks do not need

    one, other = weight_files(local), weight_files(base)
    return bool(one) and sha256_of(one) != sha256_of(other)
