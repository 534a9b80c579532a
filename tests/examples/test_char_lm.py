"""examples/char_lm.py: text, sequences, the network, its loss and samples, the command."""

import char_lm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import curve, result, run
from common.cli import Problem
from common.text import load_text, windows

import gcjax

SMALL = ["--context", "16", "--width", "16", "--layers", "1", "--heads", "2", "--workers", "2", "--batch", "8"]
TEXT = "".join(f"{n} and one is {n + 1};\n" for n in range(600))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(TEXT)
    return path


def random_like(shapes, scale=0.3):
    """Parameters without compiling their initialisation."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype), shapes)


def task_on(file, *options):
    args = char_lm.parse_options(["--text", str(file), "--out", str(file.parent), *SMALL, *options])
    return char_lm.make_task(args, *load_text(file, args.context)), args


def test_text_becomes_numbers_and_a_tenth_is_held_out(tmp_path):
    text = "Grüße, 世界 🙂\n" * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    train, validation, alphabet = load_text(tmp_path / "a.txt", 8)
    assert alphabet == "".join(sorted(set(text)))
    assert len(validation) == len(text) // 10
    assert "".join(alphabet[i] for i in [*train, *validation]) == text
    assert train.dtype == validation.dtype == np.int32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read '.*a\.txt' \(No such file or directory\); give any text file in UTF-8"),
        (b"", r"'.*a\.txt' is empty; --context 16 needs 170"),
        (b"a" * 169, "has only 169 characters; --context 16 needs 170"),
        ("ü".encode() * 169, "has only 169 characters"),
        (b"a" * 500 + "ü".encode("latin-1") + b"a" * 500, r"is not UTF-8 \(at byte 500\); save it as UTF-8"),
    ],
)
def test_a_bad_text_gives_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(Problem, match=message) as raised:
        load_text(tmp_path / "a.txt", 16)
    assert "\n" not in str(raised.value)


def test_a_folder_as_text_is_named(tmp_path):
    with pytest.raises(Problem, match=r"cannot read .*Is a directory"):
        load_text(tmp_path, 16)


def test_the_shortest_text_has_one_sequence_to_validate(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 85)
    assert len(windows(load_text(tmp_path / "a.txt", 16)[1], 16)) == 1


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 40])
def test_windows_predict_each_character_once(length):
    found = windows(np.arange(length), 8)
    assert found.shape[1] == 9
    np.testing.assert_array_equal(found[:, 1:].reshape(-1), np.arange(1, 8 * ((length - 1) // 8) + 1))
    np.testing.assert_array_equal(found[:, :-1] + 1, found[:, 1:])


def test_each_epoch_has_other_sequences_none_twice(file):
    task, _ = task_on(file)
    train, _, alphabet = load_text(file, 16)
    text = "".join(alphabet[i] for i in train)
    epochs = []
    for epoch in (0, 1, 0):
        batches = list(task.batches(epoch))
        np.testing.assert_array_equal(list(task.batches(epoch, 7)), batches[7:])
        assert len(batches) == task.steps > 10
        assert {batch.shape for batch in batches} == {(16, 17)}
        sequences = ["".join(alphabet[i] for i in row) for batch in batches for row in batch]
        assert all(sequence in text for sequence in sequences)
        epochs.append(sequences)
    places = [text.index(sequence) for sequence in epochs[0]]
    assert len({place // 16 for place in places}) == len(places)
    assert {place % 16 for place in places} != {text.index(sequence) % 16 for sequence in epochs[1]}
    assert places != sorted(places)
    assert epochs[0] == epochs[2]
    assert task.steps * 16 > 0.9 * len(train) / 16


def test_too_short_a_text_is_named(file):
    with pytest.raises(Problem, match=r"--workers 100 times --batch 80 sequences of --context 16 are more than the \d"):
        task_on(file, "--workers", "100", "--batch", "80")


def test_logits_depend_only_on_characters_before(file):
    model = char_lm.Transformer(characters=7, context=16, width=16, layers=1, heads=2)
    numbers = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 16)), jnp.int32)
    variables = random_like(jax.eval_shape(model.init, jax.random.key(1), numbers))
    logits = jax.jit(lambda x: model.apply(variables, x))
    before = logits(numbers)
    after = logits(numbers.at[:, 9].set((numbers[:, 9] + 1) % 7))
    assert before.shape == (2, 16, 7)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before - after)[:, 9:] > 1e-6).any(axis=(0, 2)).all()


def test_no_parameter_takes_a_slow_way_to_its_squares(file):
    task, _ = task_on(file)
    params = random_like(jax.eval_shape(task.init, jax.random.key(0))[0])
    table = gcjax.explain_moments(lambda p, batch: task.loss(p, batch, None))(params, next(task.batches(0))[:3])
    assert {row.rule for row in table.rows} == {"dense", "vmap", "tied"}


@pytest.mark.full
def test_squares_over_sequences_are_exact(file):
    task, _ = task_on(file)
    params = random_like(jax.eval_shape(task.init, jax.random.key(0))[0])
    batch = next(task.batches(0))[:3]

    def loss(params, batch):
        return task.loss(params, batch, None)

    _, (grad, squares) = jax.jit(gcjax.value_and_moments(loss))(params, batch)
    gradient = jax.jit(jax.grad(loss))
    each = jax.tree.map(lambda *rows: np.stack(rows), *[gradient(params, row[None]) for row in batch])
    for found, truth in zip(jax.tree.leaves(squares), jax.tree.leaves(each), strict=True):
        truth = np.square(truth / 3).sum(0)
        np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-5 * truth.max())
    for found, truth in zip(jax.tree.leaves(grad), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(found, truth.mean(0), rtol=1e-3, atol=1e-6)


def test_validation_loss_is_the_mean_over_held_out_sequences(file, monkeypatch):
    _, validation, alphabet = load_text(file, 16)
    one, other = windows(validation, 16)[:2]
    monkeypatch.setattr(char_lm, "windows", lambda *_: np.stack([one] * 256 + [other] * 5))  # more than one part
    task, _ = task_on(file)
    params = random_like(jax.eval_shape(task.init, jax.random.key(0))[0])
    zero = jax.tree.map(jnp.zeros_like, params)
    assert task.evaluate(zero, None) == {"validation_loss": pytest.approx(np.log(len(alphabet)), rel=1e-5)}
    loss = jax.jit(task.loss, static_argnums=2)
    first, second = (float(loss(params, row[None], None)) for row in (one, other))
    assert abs(first - second) > 0.01
    assert task.evaluate(params, None)["validation_loss"] == pytest.approx((256 * first + 5 * second) / 261, rel=1e-5)


def test_samples_are_drawn_one_by_one_at_the_temperature():
    model = char_lm.Transformer(characters=9, context=8, width=16, layers=1, heads=2)
    prompt = jnp.arange(8)
    params = random_like(jax.eval_shape(model.init, jax.random.key(1), prompt[None])["params"], scale=1.0)
    logits = jax.jit(lambda x: model.apply({"params": params}, x[None])[0, -1])
    for temperature in (5.0, 9.0):
        written = list(range(8))
        for key in jax.random.split(jax.random.key(0), 12):
            scores = logits(jnp.array(written[-8:])) / temperature
            written.append(int(jax.random.categorical(key, scores)))
        found = char_lm.sample(model, params, prompt, jax.random.key(0), temperature, 12)
        np.testing.assert_array_equal(found, written[8:])
        assert len(set(written[8:])) > 2


# The command.


def train(file, out, *options):
    return run("char_lm.py", "--text", file, "--out", out, *SMALL, *options)


@pytest.mark.full
def test_it_learns_and_writes(file, tmp_path):
    out = tmp_path / "run"
    options = ("--epochs", "2", "--learning-rate", "0.02", "--sample", "100", "--method", "top_k(density=0.1)")
    done = train(file, out, *options)
    assert done.returncode == 0, done.stderr
    found = result(out)
    losses = [epoch["validation_loss"] for epoch in found["epochs"]]
    assert losses[-1] < losses[0] - 0.1 < np.log(len(set(TEXT)))
    assert found["compression_ratio"] == pytest.approx(10, rel=0.02)
    sample = (out / "sample.txt").read_text()
    assert len(sample) == 100
    assert set(sample) <= set(TEXT)
    assert sample in done.stdout
    assert f"validation loss {losses[-1]:.4f} nats per character" in done.stdout
    assert (out / "curves.png").stat().st_size > 10_000


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_curves_and_text(file, tmp_path):
    options = ("--schedule", "constant", "--method", "variance(alpha=1)", "--learning-rate", "0.01")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(file, whole, *options, "--epochs", "2").returncode == 0
    assert train(file, cut, *options, "--epochs", "1").returncode == 0
    done = train(file, cut, *options, "--epochs", "2", "--resume", "--allow", "epochs")
    assert done.returncode == 0, done.stderr
    assert curve(whole, "epochs") == curve(cut, "epochs")
    assert (whole / "sample.txt").read_text() == (cut / "sample.txt").read_text()
