"""Auxiliary heads on the representations; supplement, section 1.9.

`bevatron.models.common.folding.metrics` turns logits into the numbers that users read.
"""

from jaxtyping import Float
from torch import Tensor, nn

from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.embedders import Projection
from bevatron.models.alphafold2.features import MSA_CLASSES
from bevatron.models.common.folding import LayerNorm, Linear
from bevatron.parallel.axial import transposed

LDDT_BINS, DISTOGRAM_BINS, NUM_ATOM37, ERROR_BINS = 50, 64, 37, 64


class LDDTHead(nn.Module):
    """Logits of the lDDT of every residue; algorithm 29."""

    def __init__(self, c_s: int, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_s)
        self.linear_1 = Linear(c_s, width, init="he")
        self.linear_2 = Linear(width, width, init="he")
        self.linear_3 = Linear(width, LDDT_BINS, init="final")

    def forward(self, s: Float[Tensor, "*batch N C"]) -> Float[Tensor, "*batch N 50"]:
        """Compute logits of bins of 2 from 0 to 100."""
        hidden = self.linear_1(self.norm(s)).relu()
        logits: Tensor = self.linear_3(self.linear_2(hidden).relu())
        return logits


class Heads(nn.Module):
    """All heads; that of the aligned error if the configuration has it."""

    def __init__(self, config: AlphaFold2Config) -> None:
        super().__init__()
        self.plddt = LDDTHead(config.c_s, config.lddt_width)
        self.distogram = Projection(config.c_z, DISTOGRAM_BINS, "final")
        self.masked_msa = Projection(config.c_m, MSA_CLASSES, "final")
        self.experimentally_resolved = Projection(config.c_s, NUM_ATOM37, "final")
        self.tm = Projection(config.c_z, ERROR_BINS, "final") if config.aligned_error else None

    def forward(
        self,
        structure: Float[Tensor, "*batch N C"],
        single: Float[Tensor, "*batch N C"],
        pair: Float[Tensor, "*batch R N Z"],
        msa: Float[Tensor, "*batch S N M"],
    ) -> dict[str, Tensor]:
        """Compute all logits; those of distances are symmetric in i and j.

        Parameters
        ----------
        structure : the single representation that leaves the structure module
        single, pair, msa : the representations that leave the Evoformer, of the pair own rows
        """
        half = self.distogram(pair)
        found = {
            "lddt_logits": self.plddt(structure),
            "distogram_logits": half + transposed(half),
            "masked_msa_logits": self.masked_msa(msa),
            "experimentally_resolved_logits": self.experimentally_resolved(single),
        }
        if self.tm is not None:
            found["tm_logits"] = self.tm(pair)
        return found
