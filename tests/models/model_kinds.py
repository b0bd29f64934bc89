"""A small model of every kind, and how it is saved and loaded."""

from bevatron.models import alphafold2, gpspp, graph_attention, mace


def small_mace():
    config = mace.MaceConfig.preset("small").with_data(
        atomic_numbers=(1, 8), atomic_energies=((-1.0, -2.0),), avg_num_neighbors=4.0
    )
    return mace.MACE(config)


def small_alphafold2():
    return alphafold2.AlphaFold2(alphafold2.AlphaFold2Config.preset("small"))


KINDS = {
    "alphafold2": (small_alphafold2, alphafold2.save_model, alphafold2.load_model),
    "mace": (small_mace, mace.save_model, mace.load_model),
    "gpspp": (lambda: gpspp.build("gpspp-4", num_layers=1), gpspp.save_model, gpspp.load_model),
    "graph_attention": (
        lambda: graph_attention.NodeClassifier(
            graph_attention.GraphAttentionConfig().with_data(inputs=5, outputs=3)
        ),
        graph_attention.save_model,
        graph_attention.load_model,
    ),
}
