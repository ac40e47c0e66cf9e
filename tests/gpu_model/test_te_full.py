"""The tests of rft's own layers, again over the stand-in for Transformer Engine, with both versions
of megatron-core that are supported; and checkpoints that go from one kind of layers to the other.
"""

import pytest
from test_lora import (  # noqa: F401
    test_a_checkpoint_is_the_adapter_alone_loads_elsewhere_and_exports_for_peft,
    test_it_begins_as_the_base_model_and_only_the_adapter_learns,
    test_it_is_the_same_in_every_layout,
)
from test_parity import (  # noqa: F401
    alone,
    reference,
    test_every_layout_gives_the_same_gradient_and_the_same_steps,
    test_gradient_is_that_of_the_weighted_sum,
    test_import_export_and_blocks_keep_every_byte,
    test_logprobs_are_those_of_transformers,
    test_logprobs_do_not_depend_on_the_mesh,
    test_pieces_cover_the_model_once_and_copies_are_equal,
)

pytestmark = pytest.mark.verify
