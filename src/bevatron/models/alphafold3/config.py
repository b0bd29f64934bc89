"""Hyper-parameters of AlphaFold3, frozen and checked, and named ones.

The defaults are AlphaFold3's, in the sizes that Protenix chose where the supplement is silent: 368
million parameters.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from bevatron.errors import ConfigError
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.models.common.folding import AUTOMATIC, Checkpointing
from bevatron.models.common.folding.metrics import DISTOGRAM_EDGES
from bevatron.models.common.hyper_parameters import from_preset

TOKEN_FEATURES = 32 + 32 + 1
"""Channels of the input embedding besides those of the atoms: class, profile, mean deletions."""


@dataclass(frozen=True)
class AlphaFold3Config:
    """Everything that defines an AlphaFold3 apart from its weights.

    Attributes
    ----------
    widths
        Channels of the input embedding, single and pair representations.
    atoms
        The atom encoder of the input embedder.
    templates, msa, pairformer
        Parts of the trunk.
    diffusion, confidence
        See `DiffusionConfig` and `ConfidenceConfig`.
    distogram_bins
        Number of distance bins.
    cycles
        Maximum number of passes through the trunk (recycling).
    checkpointing
        What the backward pass through the trunk recomputes; by default as little as fits the GPU.

    Raises
    ------
    ConfigError
        If a value is out of its range or values contradict each other.

    Examples
    --------
    >>> AlphaFold3Config().pairformer.num_blocks
    48
    >>> AlphaFold3Config.preset("small").widths.pair
    32
    """

    widths: TrunkWidths = field(default_factory=TrunkWidths)
    atoms: AtomConfig = field(default_factory=AtomConfig)
    templates: TemplateConfig = field(default_factory=TemplateConfig)
    msa: MsaConfig = field(default_factory=MsaConfig)
    pairformer: PairformerConfig = field(default_factory=PairformerConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    confidence: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    distogram_bins: int = 64
    cycles: int = 4
    checkpointing: Checkpointing = AUTOMATIC

    def __post_init__(self) -> None:
        if self.widths.inputs <= TOKEN_FEATURES:
            raise ConfigError(
                f"widths.inputs: expected more than the {TOKEN_FEATURES} features of a token, got "
                f"{self.widths.inputs}"
            )
        bins = DISTOGRAM_EDGES[2] + 1
        if self.distogram_bins != bins:
            raise ConfigError(f"distogram_bins: the loss has {bins}, got {self.distogram_bins}")
        if self.cycles < 1:
            raise ConfigError(f"cycles: expected 1 or more, got {self.cycles}")

    @property
    def token_width(self) -> int:
        """Channels that the atom encoder gives a token."""
        return self.widths.inputs - TOKEN_FEATURES

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return hyper-parameters by name, with changes.

        Raises ConfigError if there is no such preset, or no such entry.
        """
        return from_preset(cls, PRESETS, name, changes)


_SMALL_PAIR = PairConfig(hidden=32, num_heads=4, head_width=8, transition=2)
_SMALL_UNDROPPED = replace(_SMALL_PAIR, dropout=0.0)
_SMALL_ATOMS = AtomConfig(width=32, pair_width=8, num_heads=4, num_blocks=1)
_HALF_PAIR = PairConfig(transition=2)
_MEGAFOLD = PairformerConfig(head_width=64, transition=2, pair=_HALF_PAIR)

PRESETS: dict[str, dict[str, Any]] = {
    "alphafold3": {},
    "megafold": {
        "msa": MsaConfig(head_width=32, transition=2, pair=_HALF_PAIR),
        "pairformer": _MEGAFOLD,
        "confidence": ConfidenceConfig(
            replace(_MEGAFOLD, num_blocks=4, pair=replace(_HALF_PAIR, dropout=0.0))
        ),
    },
    "small": {
        "widths": TrunkWidths(inputs=TOKEN_FEATURES + 64, single=64, pair=32),
        "atoms": _SMALL_ATOMS,
        "templates": TemplateConfig(num_blocks=1, width=32, pair=_SMALL_PAIR),
        "msa": MsaConfig(num_blocks=2, width=32, outer_width=8, num_heads=4, pair=_SMALL_PAIR),
        "pairformer": PairformerConfig(4, 4, 16, 2, _SMALL_PAIR),
        "diffusion": DiffusionConfig(
            encoder=_SMALL_ATOMS,
            transformer=TokenTransformerConfig(width=64, num_heads=4, num_blocks=4),
            decoder=_SMALL_ATOMS,
            noise_width=32,
            checkpointing=Checkpointing(),
        ),
        "confidence": ConfidenceConfig(PairformerConfig(1, 4, 16, 2, _SMALL_UNDROPPED)),
        "checkpointing": Checkpointing(),
    },
}
"""AlphaFold3; with the trunk and the confidence head of the model that MegaFold trains (not its
diffusion, whose windows, heads and noise levels differ); and a model that a CPU trains."""
