"""The step benchmark: one process of it, at a small size."""

from bench import step


def test_every_timed_update_sends_the_density_that_it_names():
    found = step.jax_job({"size": 1 << 17, "leaves": 1, "density": 10, "repeats": 2})
    assert len(found["step_s"]) == len(found["pass_s"]) == 2
