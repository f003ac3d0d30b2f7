"""TensorBoard event files in `<run>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from tether.metrics.loggers.protocol import RunInfo, Sample


class TensorboardLogger:
    """Writes scalars, and samples as text. Events after the step that a run resumes from are purged."""

    def __init__(self, run: RunInfo) -> None:
        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples as one text."""
        self._writer.add_text("samples", "\n\n".join(map(_markdown, samples)), step)

    def close(self) -> None:
        """Write pending events."""
        self._writer.close()


def _markdown(sample: Sample) -> str:
    reward = sample.note or "none" if sample.reward is None else f"{sample.reward:g}"
    text = f"{sample.prompt}\n-----\n{sample.response}"
    # Indented, so that it is shown verbatim and not as markdown.
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"**row {sample.index}, reward {reward}**\n\n{indented}"
