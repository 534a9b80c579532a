"""Training loops: with `make_train_step`, and under plain `jax.jit` with the compressed gradient."""

import jax
import optax

import gcjax


def by_step(loss_fn, tx, params, batches, mesh, *, key=None, **options):
    """The last state and every step's metrics."""
    step = gcjax.make_train_step(loss_fn, tx, mesh, **options)
    state, metrics = step.init(params, key=key), []
    for batch in batches:
        state, one = step(state, batch)
        metrics.append(one)
    return state, metrics


def by_gradient(loss_fn, tx, optimiser, params, batches, mesh, **options):
    """The last parameters, every step's loss and the compressor's last state, with the optimiser outside."""
    value_and_grad = gcjax.compressed_value_and_grad(loss_fn, tx, mesh, **options)
    over_workers = jax.NamedSharding(mesh, jax.P(options.get("axis_name", "data")))

    @jax.jit
    def step(params, opt_state, compression, batch):
        loss, grads, compression = value_and_grad(params, compression, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, compression, loss

    opt_state, compression, losses = optimiser.init(params), value_and_grad.init(params), []
    for batch in batches:
        batch = jax.device_put(batch, over_workers)
        params, opt_state, compression, loss = jax.block_until_ready(step(params, opt_state, compression, batch))
        losses.append(loss)
    return params, losses, compression
