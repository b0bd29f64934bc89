"""What a run says of the complexes it is trained on."""

import gzip

import numpy as np
import pytest

from bevatron.data.proteins.chain_index import Choices
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.errors import ConfigError, DataError
from bevatron.recipes.alphafold3.data import ComplexDataConfig, load_complexes, sizes_for_validation
from bevatron.recipes.alphafold3.run import AlphaFold3Run
from bevatron.recipes.alphafold3.stores import (
    ComplexFeaturizer,
    open_complexes,
    prepare_complexes,
)


def report_of(store, **changes):
    (stage,) = AlphaFold3Run.from_values({"preset": "small"}).stages.values()
    sizes = sizes_for_validation(stage.sizes)
    return load_complexes(ComplexDataConfig(train=(store,), **changes), sizes).report


def test_complexes_from_which_confidences_do_not_learn_are_counted(shared, components, tmp_path):
    text = gzip.decompress((shared / "data/complexes/mmcif/1bna.cif.gz").read_bytes()).decode()
    (tmp_path / "known.cif").write_text(text)
    unknown = [line for line in text.splitlines() if "d_resolution_high" not in line]
    unknown = [line for line in unknown if "ls_d_res_high" not in line]
    (tmp_path / "unknown.cif").write_text("\n".join(unknown))
    prepare_complexes(
        [tmp_path], tmp_path / "store", components=components, workers=0, progress=False
    )
    said = report_of(tmp_path / "store", valid_size=0.0)
    assert any("not trained on 1 of them" in line for line in said)


def test_a_store_of_one_complex_says_that_nothing_is_validated(shared, components, tmp_path):
    file = shared / "data/complexes/mmcif/1bna.cif.gz"
    prepare_complexes([file], tmp_path, components=components, workers=0, progress=False)
    said = "warning: nothing is validated, there is one complex alone"
    assert said in report_of(tmp_path)
    assert said not in report_of(tmp_path, valid_size=0.0)


def test_a_store_is_drawn_from_as_often_as_it_has_complexes(complexes):
    sizes = SampleSizes()
    data = load_complexes(ComplexDataConfig(train=(complexes,), valid_size=0.0), sizes)
    (source,) = data.draws(sizes, 0).sources
    assert source.share == 3
    assert len(source.dataset) > 3  # chains and interfaces


def test_a_structure_without_a_chain_to_train_on_says_which_are_left_out(shared, components):
    path = shared / "data/complexes/bm5/bound/4FQI_target.pdb.gz"
    with pytest.raises(
        DataError, match=r"all chains are left .* \(2 broken backbones\); --keep-all"
    ):
        ComplexFeaturizer(components).entry(str(path))


def test_nothing_is_said_where_all_have_a_resolution(complexes):
    assert not any("not trained on" in line for line in report_of(complexes))


def test_chains_and_interfaces_are_drawn_by_their_weights(complexes):
    sizes = SampleSizes(CropSizes(8, 99), 1)
    data = load_complexes(ComplexDataConfig(train=(complexes,), valid_size=0.0), sizes)
    (source,) = data.draws(sizes, 0).sources
    published = Choices.of(open_complexes(complexes))
    np.testing.assert_allclose(source.weights, published.weight)
    assert source.dataset.units[:, 1:].tolist() == published.chains.tolist()
    assert len(set(source.weights.tolist())) > 2


def test_a_crop_is_around_the_chain_or_the_interface_that_was_drawn(complexes):
    sizes = SampleSizes(CropSizes(1, 99, shares=(0.0, 1.0, 0.0)), 1)
    data = load_complexes(ComplexDataConfig(train=(complexes,), valid_size=0.0), sizes)
    dataset = data.draws(sizes, 0).sources[0].dataset
    for number, (_, *chains) in enumerate(dataset.units.tolist()):
        for seed in range(5):
            (chain,) = dataset.sample(number, seed)["asym_id"].tolist()
            assert chain in chains
    assert len({tuple(unit[1:]) for unit in dataset.units.tolist()}) > 4


def test_validation_has_spatial_crops_with_the_best_templates():
    found = sizes_for_validation(SampleSizes(CropSizes(8, 99), 3))
    assert (found.crop.shares, found.best_templates) == ((0.0, 1.0, 0.0), True)
    assert (found.crop.tokens, found.crop.atoms, found.rows) == (8, 99, 3)


def test_complexes_held_out_are_not_counted_as_trained_on(complexes):
    training, validation = report_of(complexes)
    assert training.startswith("complexes for training: 2 of")
    assert validation.startswith("complexes for validation: 1 of")


def test_a_number_of_complexes_is_held_out(complexes):
    training, validation = report_of(complexes, valid_size=2)
    assert training.startswith("complexes for training: 1 of")
    assert validation.startswith("complexes for validation: 2 of")


def test_a_store_is_trained_on_once_and_validated_on_with_a_warning(complexes):
    said = report_of(complexes, valid=(complexes,))
    assert f"warning: {complexes} is validated on and trained on" in said
    config = ComplexDataConfig(train=(complexes, complexes))
    with pytest.raises(ConfigError, match=r"data\.train: .* is there twice; give it once"):
        load_complexes(config, sizes_for_validation(SampleSizes(CropSizes(8, 99), 1)))
