"""Parameters that are not trained: neither differentiated nor sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax

INPUTS, HIDDEN = 37, 41  # sizes that no other array has
PARAMS = {
    "body": {"kernel": jnp.ones((INPUTS, HIDDEN)) / 8, "bias": jnp.zeros(HIDDEN)},
    "head": {"kernel": jnp.ones((HIDDEN, 2)) / 8, "bias": jnp.zeros(2)},
}
HEAD = {"body": False, "head": True}


def loss_fn(params, batch):
    body, head = params["body"], params["head"]
    hidden = jnp.tanh(batch[0] @ body["kernel"] + body["bias"])
    return jnp.mean((hidden @ head["kernel"] + head["bias"] - batch[1]) ** 2)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(16, INPUTS)).astype(np.float32), rng.normal(size=(16, 2)).astype(np.float32)


def chain(**options):
    return optax.chain(gcjax.variance_compress(axis_name="data", capacity=64, **options), optax.adam(1e-2))


def frozen_partition(labels):
    return optax.partition({"train": chain(), "frozen": optax.set_to_zero()}, labels)


LABELS = {"body": "frozen", "head": "train"}
TRANSFORMS = {
    "chain": chain,
    "partition": lambda: frozen_partition(LABELS),
    "partition by function": lambda: frozen_partition(
        lambda params: jax.tree_util.tree_map_with_path(lambda path, _: LABELS[path[0].key], params)
    ),
    "masked": lambda: optax.masked(chain(), HEAD),
}


@cases(
    ("transform", "options"),
    [(transform, {}) for transform in TRANSFORMS] + [("chain", {"moments": None}), ("partition", {"accumulate": 2})],
    ids=str,
    default=2,
)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_only_trained_parameters_change_are_sent_and_have_state(transform, options):
    step = gcjax.make_train_step(loss_fn, TRANSFORMS[transform](), mesh_of(4), trainable=HEAD, **options)
    state, losses = step.init(PARAMS), []
    assert max(x.size for x in jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))) == HIDDEN * 2
    for i in range(20):
        state, metrics = step(state, batch_of(i))
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < 0.9 * losses[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state.params["body"], PARAMS["body"]))
    assert not np.array_equal(state.params["head"]["kernel"], PARAMS["head"]["kernel"])
    info = gcjax.info(state.opt_state)
    assert 0 < info.compression_ratio * info.sent.mean() <= HIDDEN * 2 + 2.5  # the number of parameters it has seen


@pytest.mark.parametrize("moments", [None, gcjax.value_and_moments])
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_frozen_parameters_are_not_differentiated(moments):
    def of_kernel_size(trainable):
        step = gcjax.make_train_step(loss_fn, chain(), mesh_of(4), trainable=trainable, moments=moments)
        lines = step.lower(step.init(PARAMS), batch_of()).as_text().splitlines()
        shapes = [f"-> tensor<{a}x{b}xf32>" for a, b in [(INPUTS, HIDDEN), (HIDDEN, INPUTS)]]
        return [line for line in lines if "dot_general" in line and any(shape in line for shape in shapes)]

    assert of_kernel_size(None)
    assert of_kernel_size(HEAD) == []


@cases("moments", [None, gcjax.value_and_moments], default=1)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_training_a_part_is_training_the_part_alone(moments):
    def head_loss(head, batch):
        return loss_fn({"body": PARAMS["body"], "head": head}, batch)

    alone = gcjax.make_train_step(head_loss, chain(), mesh_of(4), moments=moments)
    part = gcjax.make_train_step(loss_fn, chain(), mesh_of(4), moments=moments, trainable=lambda params: HEAD)
    a, b = alone.init(PARAMS["head"]), part.init(PARAMS)
    for i in range(3):
        a, b = alone(a, batch_of(i))[0], part(b, batch_of(i))[0]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a.params, b.params["head"])


def test_a_frozen_parameter_may_have_any_dtype():
    def loss(params, batch):
        return loss_fn(params["net"], batch) + 0.0 * params["table"][0]

    step = gcjax.make_train_step(loss, chain(), mesh_of(4), trainable={"net": True, "table": False})
    state, metrics = step(step.init({"net": PARAMS, "table": jnp.arange(3)}), batch_of())
    np.testing.assert_array_equal(state.params["table"], [0, 1, 2])
    assert np.isfinite(metrics.loss).all()


def test_frozen_parameters_may_be_sharded():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    params = {
        "body": {"kernel": jnp.ones((8, 12)) / 8, "bias": jnp.zeros(12)},
        "head": {"kernel": jnp.ones((12, 2)) / 8, "bias": jnp.zeros(2)},
    }
    batch, found = (batch_of()[0][:, :8], batch_of()[1]), []
    for spec, averaged in ((P(), ("slow", "fast")), (P("fast"), "slow")):
        step = gcjax.make_train_step(
            loss_fn,
            optax.chain(gcjax.dense_compress(axis_name=averaged), optax.adam(1e-2)),
            mesh,
            axis_name=("slow", "fast"),
            param_specs={name: {"kernel": spec, "bias": P()} for name in params},
            trainable=HEAD,
            moments=None,
        )
        state, _ = step(step.init(params), batch)
        assert state.params["body"]["kernel"].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
        found.append(jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)
    assert not np.array_equal(found[0]["head"]["kernel"], params["head"]["kernel"])


@pytest.mark.parametrize(
    "tx",
    [frozen_partition(LABELS), optax.masked(chain(), HEAD)],
    ids=["partition", "masked"],
)
def test_an_update_that_differs_between_workers_raises_with_the_cure(tx):
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(4))
    state = step.init(PARAMS)
    with pytest.raises(
        ValueError, match=r"params\['body'\]\['bias'\] differs between workers along \['data'\].*trainable=.*dense_comp"
    ):
        step(state, batch_of())
