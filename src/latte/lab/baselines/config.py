"""The configuration of our own layers for models that the paper compares with."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from latte.models.config import LatteConfig, one_line_errors


@strict
class ComparatorConfig(LatteConfig):
    r"""Configuration of the baselines' models. Fields that are not here are LatteConfig's.

    Args:
        mixer: Name of the mixer: ``mega``, ``h3`` (causal only), ``s5``, ``luna`` or ``linformer``
            (bidirectional only).
        state_size: Size of the mixer's state; None is the layer's own default. It is the number of
            moving averages of ``mega``, of states of ``h3`` and ``s5``, of memories of ``luna``,
            and the projected length of ``linformer``. The longest sequence of ``linformer`` is
            ``max_position_embeddings``.
        chunk_size: Chunk of ``mega``'s attention in tokens; None is the whole sequence.
        head_dim: Width of a head of ``h3``; 1 if None.
        num_attention_heads: Number of heads of ``luna`` and ``linformer``, or of blocks of ``s5``.

    Raises:
        LatteError: The errors of LatteConfig.
    """

    model_type = "latte_comparator"

    mixer: Literal["mega", "h3", "s5", "luna", "linformer"] = "mega"  # type: ignore[assignment]
    state_size: int | None = None
    chunk_size: int | None = None
    latent_input: Literal["none"] = "none"  # type: ignore[assignment]
    num_latents: int | None = None
    sliding_window: int | None = None
    position: Literal["sinusoidal", "none"] = "none"  # type: ignore[assignment]
    use_cache: bool = False

    @property
    def mixer_uses(self) -> tuple[str, ...]:
        """None of the fields that Latte's own mixers read."""
        return ()

    def state_grows(self, layer_idx: int) -> bool:
        """There is no state at all."""
        return False

    def validate_comparator(self) -> None:
        """Part of ``@strict``: the sizes of the mixers."""
        for name in ("state_size", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.chunk_size is not None and self.mixer != "mega":
            raise ValueError(f"chunk_size is for mixer='mega', got mixer={self.mixer!r}")


one_line_errors(ComparatorConfig)
