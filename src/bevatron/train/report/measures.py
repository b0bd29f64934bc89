"""Names of measures as tables and figures write them."""

WORDS = {
    text.lower(): text
    for text in (
        *("MAE", "RMSE", "MSE", "AUROC", "AP", "2D", "3D"),
        *("lDDT", "pLDDT", "pTM", "ipTM", "TM", "RMSD", "DockQ", "FAPE", "MSA", "PAE", "PDE"),
        *("CA", "DNA", "RNA"),
    )
} | {"r2": "R²"}
"""Part of a name -> what is written for it."""

PHRASES = {
    "lddt_ca": "lDDT of CA atoms",
    "distogram": "cross entropy of the distogram",
    "contact_precision": "precision of contacts",
}
"""Measure -> its name, where its parts would not say enough."""


def term_name(name: str) -> str:
    """Write the name of a term of the loss.

    Examples
    --------
    >>> term_name("masked_msa"), term_name("distogram")
    ('masked MSA', 'distogram')
    """
    return " ".join(WORDS.get(word, word) for word in name.split("_"))


def measure_name(name: str) -> str:
    """Write the name of a measure as it is usually written, a mode or head behind it.

    Examples
    --------
    >>> measure_name("lddt_ca"), measure_name("loss_masked_msa"), measure_name("roc_auc")
    ('lDDT of CA atoms', 'loss masked MSA', 'ROC-AUC')
    >>> measure_name("tm_score"), measure_name("ligand_rmsd"), measure_name("pde")
    ('TM-score', 'ligand RMSD (Å)', 'PDE')
    >>> measure_name("3d/gap_r2"), measure_name("wb97x/forces_rmse")
    ('gap R², 3D', 'forces RMSE, wb97x')
    """
    group, _, measure = name.rpartition("/")
    written = PHRASES.get(measure) or term_name(measure)
    written = written.replace("roc auc", "ROC-AUC").replace("TM score", "TM-score")
    written += " (Å)" if "RMSD" in written.split() else ""
    return f"{written}, {WORDS.get(group, group)}" if group else written
