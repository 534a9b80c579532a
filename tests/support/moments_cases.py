"""Losses over a batch, one per kind of sink or trap. `CASES`: name -> function that makes (loss, params, batch)."""

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 6
TOKENS = np.array([[1, 1, 2, 0], [0, 0, 0, 0], [3, 1, 3, 1], [8, 7, 6, 5], [2, 2, 8, 8], [4, 4, 4, 1]])


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5)


def batch_of(*shape):
    """Samples of this shape, and a factor `s` on the loss of each."""
    return {"x": draw(1, SIZE, *shape), "s": draw(2, SIZE)}


def batch_of_tokens():
    """Each sample has four tokens below 9. Some occur twice in a sample."""
    return {"x": jnp.asarray(TOKENS), "s": draw(2, SIZE)}


def assert_close(got, want, rtol=1e-12, name=""):
    """Compare trees, relative to the largest entry of all leaves: some true gradients are zero."""
    largest = max(np.max(np.abs(w), initial=0.0) for w in jax.tree.leaves(want))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=0, atol=rtol * largest, err_msg=name), got, want)


def mean_square(y):
    return jnp.mean(jnp.sum(jnp.square(y).reshape(y.shape[0], -1), axis=1))


def scaled(y, batch):
    """A loss whose gradient differs between samples even for a linear net."""
    return jnp.mean(batch["s"] * jnp.sum(jnp.sin(y).reshape(y.shape[0], -1), axis=1))


def net(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def weighted_net(params, batch):
    """A sum of per-sample losses with weights."""
    errors = (jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] - batch["y"]) ** 2
    return jnp.sum(batch["weight"] * errors)


def net_data(size=SIZE, dtype=jnp.float32):
    """Parameters and a batch for `net`."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {"w": normal(5, 7), "b": normal(7), "v": normal(7)}, {"x": normal(size, 5), "y": normal(size)}


def dense():
    params = {"w": draw(3, 5, 7), "b": draw(4, 7), "v": draw(5, 7, 3)}

    def loss(p, batch):
        return scaled(jnp.tanh(batch["x"] @ p["w"] + p["b"]) @ p["v"], batch)

    return loss, params, batch_of(5)


def dense_with_positions():
    loss, params, batch = dense()
    return loss, params, {**batch, "x": draw(1, SIZE, 4, 5)}


def einsum_heads():
    params = {"q": draw(3, 5, 2, 3), "o": draw(4, 2, 3, 5), "e": draw(5, 2, 3, 4)}

    def loss(p, batch):
        heads = jnp.einsum("btd,dhk->bhtk", batch["x"], p["q"])
        experts = jnp.einsum("bhtk,hkf->bhtf", heads, p["e"])
        out = jnp.einsum("bhtk,hkd->btd", jnp.tanh(heads), p["o"])
        return scaled(out, batch) + scaled(experts, batch)

    return loss, params, batch_of(4, 5)


def conv(shape, kernel, channels=4, **keywords):
    def case():
        numbers = ("NHWC", "HWIO", "NHWC") if len(shape) == 2 else ("NWC", "WIO", "NWC")

        def loss(p, batch):
            y = jax.lax.conv_general_dilated(batch["x"], p["k"], dimension_numbers=numbers, **keywords)
            return scaled(jnp.tanh(y), batch)

        return loss, {"k": draw(3, *kernel)}, batch_of(*shape, channels)

    return case


def conv_transposed():
    def loss(p, batch):
        y = jax.lax.conv_transpose(batch["x"], p["k"], (2, 2), "SAME")
        return scaled(jnp.tanh(y), batch)

    return loss, {"k": draw(3, 3, 3, 4, 5)}, batch_of(5, 6, 4)


def conv_channels_first():
    def loss(p, batch):
        y = jax.lax.conv(batch["x"], p["k"], (2, 1), "SAME")
        return scaled(jax.nn.relu(y), batch)

    return loss, {"k": draw(3, 7, 4, 3, 2)}, batch_of(4, 6, 5)


def embedding(look_up):
    def case():
        params = {"t": draw(3, 9, 5), "w": draw(4, 5, 3)}

        def loss(p, batch):
            return scaled(jnp.tanh(look_up(p["t"], batch["x"]) @ p["w"]), batch)

        return loss, params, batch_of_tokens()

    return case


def tied_embedding():
    _loss, params, batch = embedding(lambda t, x: t[x])()

    def tied(p, batch):
        hidden = jnp.tanh(p["t"][batch["x"]] @ p["w"] @ p["w"].T)
        return scaled(hidden @ p["t"].T, batch)

    return tied, params, batch


def weight_and_its_transpose():
    def loss(p, batch):
        return scaled(jnp.tanh(batch["x"] @ p["w"]) @ p["w"].T + 3 * batch["x"], batch)

    return loss, {"w": draw(3, 5, 7)}, batch_of(5)


def scanned_blocks(checkpoint=False, unroll=1):
    def case():
        params = {"w": draw(3, 4, 5, 5), "b": draw(4, 4, 5), "u": draw(5, 4, 5, 5)}

        def block(h, p):
            return h + jnp.tanh(h @ p["w"] + p["b"]) @ p["u"], None

        def loss(p, batch):
            step = jax.checkpoint(block) if checkpoint else block
            return scaled(jax.lax.scan(step, batch["x"], p, unroll=unroll)[0], batch)

        return loss, params, batch_of(3, 5)

    return case


def scanned_twice():
    _loss, params, batch = scanned_blocks()()

    def twice(p, batch):
        def block(h, p):
            return h + jnp.tanh(h @ p["w"] + p["b"]) @ p["u"], None

        for _ in range(2):
            batch = {**batch, "x": jax.lax.scan(block, batch["x"], p)[0]}
        return scaled(batch["x"], batch)

    return twice, params, batch


def rnn(tied=False, reverse=False):
    def case():
        params = {"w": draw(3, 4, 4), "u": draw(4, 5, 4), "b": draw(5, 4)}

        def loss(p, batch):
            def step(h, x):
                h = jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"] + (jnp.cos(h) @ p["w"].T if tied else 0))
                return h, h

            start = jnp.zeros_like(batch["x"][:, 0, :4])
            last, all_h = jax.lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1), reverse=reverse)
            return scaled(last, batch) + mean_square(jnp.swapaxes(all_h, 0, 1))

        return loss, params, batch_of(7, 5)

    return case


def layers_of_rnns():
    params = {"w": draw(3, 2, 4, 4), "u": draw(4, 2, 4, 4)}

    def loss(p, batch):
        def layer(xs, p):
            def step(h, x):
                h = jnp.tanh(h @ p["w"] + x @ p["u"])
                return h, h

            return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[1], None

        return scaled(jnp.swapaxes(jax.lax.scan(layer, jnp.swapaxes(batch["x"], 0, 1), p)[0], 0, 1), batch)

    return loss, params, batch_of(5, 4)


def rnn_of_shared_layers():
    """One weight used by every inner step of every outer step: a sum over two nested scans."""

    def loss(p, batch):
        def outer(h, x):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + x), None), h, length=3)[0], None

        start = jnp.zeros((batch["x"].shape[0], 4))
        return scaled(jax.lax.scan(outer, start, jnp.swapaxes(batch["x"], 0, 1))[0], batch)

    return loss, {"w": draw(3, 4, 4)}, batch_of(5, 4)


def rnn_with_masked_weight():
    """The weight's factor differs between time steps, and is the same for all samples."""

    def loss(p, batch):
        def step(h, inputs):
            x, mask = inputs
            return jnp.tanh(h @ (p["w"] * mask) + x), None

        start = jnp.zeros((batch["x"].shape[0], 4))
        return scaled(jax.lax.scan(step, start, (jnp.swapaxes(batch["x"], 0, 1), draw(9, 5, 4, 4)))[0], batch)

    return loss, {"w": draw(3, 4, 4)}, batch_of(5, 4)


def conv_over_time():
    def loss(p, batch):
        def step(h, x):
            y = jax.lax.conv_general_dilated(h, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.tanh(y + x), None

        xs = jnp.moveaxis(batch["x"], 1, 0)
        return scaled(jax.lax.scan(step, jnp.ones_like(xs[0]), xs)[0], batch)

    return loss, {"k": draw(3, 3, 3, 2, 2)}, batch_of(3, 4, 4, 2)


def embedding_over_time():
    def loss(p, batch):
        def step(h, token):
            return jnp.tanh(h + p["t"][token]), None

        start = jnp.zeros((batch["x"].shape[0], 3))
        return scaled(jax.lax.scan(step, start, batch["x"].T)[0], batch)

    return loss, {"t": draw(3, 9, 3)}, batch_of_tokens()


def factors_on_the_weight():
    params = {"w": draw(3, 5, 7), "v": draw(4, 7, 3), "u": draw(6, 5, 3), "g": draw(5)}

    def loss(p, batch):
        mask = draw(7, 5, 7) > 0
        hidden = jnp.tanh(batch["x"] @ (-3.0 * p["w"] * mask)) @ (p["v"] / 7.0)
        return scaled(hidden + batch["x"] @ (p["u"] * p["g"]) * 2.0, batch)

    return loss, params, batch_of(2, 5)


def slices_and_joins_of_a_weight():
    params = {"w": draw(3, 5, 8), "a": draw(4, 3, 4), "b": draw(5, 2, 4)}

    def loss(p, batch):
        q, k = jnp.split(p["w"], 2, axis=1)
        x = batch["x"]
        return scaled((x @ q) * jnp.cos(x @ k) + x @ jnp.concatenate([p["a"], p["b"]])[::-1], batch)

    return loss, params, batch_of(3, 5)


def low_rank_weight():
    params = {"w": draw(3, 9, 8), "a": draw(4, 9, 2), "b": draw(5, 2, 8)}

    def loss(p, batch):
        return scaled(jnp.tanh(batch["x"] @ (p["w"] + 0.3 * p["a"] @ p["b"])), batch)

    return loss, params, batch_of(3, 9)


def weight_norm():
    params = {"v": draw(3, 9, 8), "g": draw(4, 8)}

    def loss(p, batch):
        weight = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return scaled(jnp.tanh(batch["x"] @ weight), batch)

    return loss, params, batch_of(3, 9)


def weight_decay_in_the_loss():
    loss, params, batch = dense()
    return lambda p, b: loss(p, b) + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)), params, batch


def unused_and_scalar_parameters():
    loss, params, batch = dense()
    params = {
        **params,
        "unused": draw(6, 3),
        "spare": jnp.asarray(2.0),
        "temperature": jnp.asarray(1.3),
        "none": jnp.zeros((0, 4)),
    }
    return lambda p, b: loss(p, b) * p["temperature"], params, batch


def nested_jit():
    loss, params, batch = dense_with_positions()
    return jax.jit(lambda p, b: jax.jit(loss)(p, b)), params, batch


def checkpointed():
    _, params, batch = dense_with_positions()

    @jax.checkpoint
    def layer(p, x):
        return jnp.tanh(x @ p["w"] + p["b"])

    return lambda p, b: scaled(layer(p, b["x"]) @ p["v"], b), params, batch


def custom_rules():
    _, params, batch = dense_with_positions()

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, jnp.cos(x)), lambda res, ct: (2 * ct * res,))

    @jax.custom_jvp
    def half(x):
        return x / 2

    half.defjvp(lambda x, t: (half(x[0]), t[0] / 2))
    return lambda p, b: scaled(half(double(b["x"] @ p["w"] + p["b"]) @ p["v"]), b), params, batch


def custom_rules_that_start_from_something():
    """Backward passes that add to values other than zero: a scatter, and a scan's carry."""
    params = {"t": draw(3, 9, 5), "w": draw(4, 5, 5)}

    @jax.custom_vjp
    def look_up(t, x):
        return t[x]

    look_up.defvjp(lambda t, x: (t[x], (t, x)), lambda res, ct: ((res[0] * ct.sum()).at[res[1]].add(ct), None))

    @jax.custom_vjp
    def layer(w, x):
        return x @ w

    def layer_backward(res, ct):
        w, x = res
        steps = jnp.swapaxes(x, 0, 1), jnp.swapaxes(ct, 0, 1)
        return jax.lax.scan(lambda c, xy: (c + xy[0].T @ xy[1], None), w * ct.sum(), steps)[0], ct @ w.T

    layer.defvjp(lambda w, x: (x @ w, (w, x)), layer_backward)

    def loss(p, batch):
        return scaled(layer(p["w"], jnp.tanh(look_up(p["t"], batch["x"]))), batch)

    return loss, params, batch_of_tokens()


def control_flow_and_sorts():
    params = {"w": draw(3, 5, 5), "b": draw(4, 5)}

    def loss(p, batch):
        h = jax.lax.cond(jnp.sum(p["b"]) > 100.0, lambda h: h @ p["w"], lambda h: jnp.sin(h) @ p["w"], batch["x"])
        h = jnp.sort(h + p["b"], axis=-1)
        h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.cumsum(h, axis=-1) / 3, h)
        return scaled(jnp.linalg.solve(p["w"] + 9 * jnp.eye(5), h[..., None]), batch)

    return loss, params, batch_of(5)


def while_loops():
    """Loops of unknown length, which have no gradient: beside the layers, and inside the body of a scan."""

    def halved(x):
        """Each sample times the first power of 1/2 that brings it below 1."""
        small = jax.vmap(
            lambda x: jax.lax.while_loop(lambda s: jnp.max(jnp.abs(x)) * s > 1.0, lambda s: s / 2, jnp.ones(()))
        )
        return small(jax.lax.stop_gradient(x))[:, None]

    def loss(p, batch):
        def layer(h, w):
            h = jnp.sin(h @ w) * 3
            return h * halved(h), None

        h = 3 * batch["x"] @ p["v"]
        return scaled(jax.lax.scan(layer, h * halved(h), p["w"])[0], batch)

    return loss, {"v": draw(3, 5, 4), "w": draw(4, 3, 4, 4)}, batch_of(5)


def attention():
    width, heads = 8, 2
    params = {
        "qkv": draw(3, width, 3, heads, width // heads),
        "out": draw(4, heads, width // heads, width),
        "scale": 1 + draw(5, width),
        "bias": draw(6, width),
    }

    def loss(p, batch):
        x = batch["x"]
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->nbthk", y, p["qkv"]), 0, 0)
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return scaled(x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["out"]), batch)

    return loss, params, batch_of(5, width)


def complex_layers():
    """Real parameters of complex products, with and without positions, each with its own way from real to complex."""
    params = {"re": draw(3, 5, 7), "im": draw(4, 5, 7), "mix": draw(5, 7, 6), "shared": draw(6, 6, 6)}

    def loss(p, batch):
        hidden = batch["x"] @ (p["re"] + 1j * p["im"])
        hidden = hidden * jax.nn.sigmoid(hidden.real) @ p["mix"].astype(hidden.dtype)
        hidden = hidden @ p["shared"] + jnp.conj(hidden * jnp.exp(0.3j) @ p["shared"].T)
        return scaled(jnp.abs(hidden), batch) + scaled(hidden.imag, batch)

    return loss, params, batch_of(5)


def complex_layers_with_positions():
    loss, params, batch = complex_layers()
    return loss, params, {**batch, "x": draw(1, SIZE, 4, 5)}


def fourier_layers():
    params = {"w": draw(3, 8, 8), "filter": draw(4, 4, 8), "phase": draw(5, 4)}

    def loss(p, batch):
        modes = jnp.fft.rfft(batch["x"] @ p["w"], axis=1) * p["filter"] * jnp.exp(1j * p["phase"])[:, None]
        mixed = jnp.einsum("btd,de->bte", modes, p["w"])
        return scaled(jnp.fft.irfft(mixed, axis=1), batch)

    return loss, params, batch_of(6, 8)


def complex_conv():
    def loss(p, batch):
        kernel = jax.lax.complex(p["re"], p["im"])
        x = batch["x"].astype(kernel.dtype)
        y = jax.lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return scaled(jnp.abs(y + 1), batch)

    return loss, {"re": draw(3, 3, 3, 4, 5), "im": draw(4, 3, 3, 4, 5)}, batch_of(6, 5, 4)


def complex_rnn():
    params = {"w": draw(3, 8, 8), "t": draw(4, 9, 8)}

    def loss(p, batch):
        tokens = p["t"].astype(complex)[batch["x"]]

        def step(h, x):
            h = h @ p["w"].astype(h.dtype) + x * jnp.exp(1j * h.real)
            return h, h

        _, hs = jax.lax.scan(step, jnp.zeros_like(tokens[:, 0]), jnp.moveaxis(tokens, 1, 0))
        return scaled(jnp.abs(jnp.moveaxis(hs, 0, 1) + 1), batch)

    return loss, params, batch_of_tokens()


CASES = {
    "dense": dense,
    "dense with positions": dense_with_positions,
    "einsum heads": einsum_heads,
    "conv same": conv((6, 5), (3, 3, 4, 5), window_strides=(1, 1), padding="SAME"),
    "conv valid strided": conv((7, 6), (3, 2, 4, 5), window_strides=(2, 3), padding="VALID"),
    "conv dilated kernel": conv((8, 8), (3, 3, 4, 2), window_strides=(1, 2), padding="SAME", rhs_dilation=(2, 3)),
    "conv dilated input": conv(
        (4, 5), (3, 3, 4, 2), window_strides=(1, 1), padding=((2, 1), (0, 2)), lhs_dilation=(2, 3)
    ),
    "conv negative padding": conv((6, 6), (3, 3, 4, 2), window_strides=(1, 1), padding=((-1, 0), (0, -2))),
    "conv one tap": conv((5, 5), (1, 1, 4, 6), window_strides=(2, 2), padding="VALID"),
    "conv one position": conv((3, 3), (3, 3, 4, 6), window_strides=(1, 1), padding="VALID"),
    "conv grouped": conv((6, 5), (3, 3, 2, 6), window_strides=(2, 1), padding="SAME", feature_group_count=2),
    "conv depthwise": conv((6, 5), (3, 3, 1, 8), window_strides=(1, 1), padding="SAME", feature_group_count=4),
    "conv one axis": conv((9,), (4, 4, 5), window_strides=(2,), padding="SAME"),
    "conv transposed": conv_transposed,
    "conv channels first": conv_channels_first,
    "conv many taps": conv((20, 20), (17, 17, 2, 1), channels=2, window_strides=(1, 1), padding="VALID"),
    "embedding by index": embedding(lambda t, x: t[x]),
    "embedding by take": embedding(lambda t, x: jnp.take(t, x, axis=0)),
    "embedding clipped": embedding(lambda t, x: jnp.take(t, x + 2, axis=0, mode="clip")),
    "embedding with ids beyond the table": embedding(lambda t, x: t.at[x + 3].get(mode="fill", fill_value=0)),
    "embedding one hot": embedding(lambda t, x: jax.nn.one_hot(x, 9) @ t),
    "embedding of columns": embedding(lambda t, x: jnp.moveaxis(t[:5].T[:, x % 5], 0, -1)),
    "tied embedding": tied_embedding,
    "weight and its transpose": weight_and_its_transpose,
    "scanned blocks": scanned_blocks(),
    "scanned blocks unrolled": scanned_blocks(unroll=2),
    "scanned checkpointed blocks": scanned_blocks(checkpoint=True),
    "scanned twice": scanned_twice,
    "rnn": rnn(),
    "rnn reversed": rnn(reverse=True),
    "rnn tied": rnn(tied=True),
    "layers of rnns": layers_of_rnns,
    "rnn of shared layers": rnn_of_shared_layers,
    "rnn with masked weight": rnn_with_masked_weight,
    "conv over time": conv_over_time,
    "embedding over time": embedding_over_time,
    "factors on the weight": factors_on_the_weight,
    "slices and joins of a weight": slices_and_joins_of_a_weight,
    "low rank weight": low_rank_weight,
    "weight norm": weight_norm,
    "weight decay in the loss": weight_decay_in_the_loss,
    "unused and scalar parameters": unused_and_scalar_parameters,
    "nested jit": nested_jit,
    "checkpointed": checkpointed,
    "custom rules": custom_rules,
    "custom rules that start from something": custom_rules_that_start_from_something,
    "control flow and sorts": control_flow_and_sorts,
    "while loops": while_loops,
    "attention": attention,
    "complex layers": complex_layers,
    "complex layers with positions": complex_layers_with_positions,
    "fourier layers": fourier_layers,
    "complex conv": complex_conv,
    "complex rnn": complex_rnn,
}
