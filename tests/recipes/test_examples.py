"""The configurations in examples/ are ones that the command takes."""

from pathlib import Path

import pytest

from bevatron.recipes import recipe
from bevatron.recipes.training import configuration

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path: Path) -> None:
    config = configuration(str(path), [])
    assert isinstance(config, recipe(config.recipe)[0])


def test_the_eight_sets_have_a_head_each_and_the_papers_model() -> None:
    config = configuration(str(EXAMPLES / "mace_eight_sets.yaml"), [])
    sources = config.data.sources()
    assert len(sources) == 8
    assert config.model.correlation == 2
    assert config.model.r_max == 4.5
    assert sources["al_hcl"].labels.group_weights == {"al_hcl": 10.0}
