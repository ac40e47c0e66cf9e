"""The tests of adapters beside rft's own layers, again over the stand-in for Transformer Engine."""

import pytest
from test_lora import (  # noqa: F401
    alone,
    mixture,
    pushed,
    test_a_checkpoint_is_the_adapter_alone_loads_elsewhere_and_exports_for_peft,
    test_adapters_of_experts_are_saved_for_any_number_of_ranks_and_for_peft,
    test_adapters_of_experts_learn_along_the_routes_of_an_engine,
    test_an_expert_learns_the_same_in_every_layout,
    test_every_expert_has_an_adapter_of_its_own,
    test_it_begins_as_the_base_model_and_only_the_adapter_learns,
    test_it_is_the_same_in_every_layout,
    test_recomputed_layers_under_a_frozen_embedding_still_learn,
    test_what_it_computes_and_what_it_shows_is_the_formula,
)

pytestmark = pytest.mark.verify
