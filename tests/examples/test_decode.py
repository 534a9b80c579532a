"""examples/common/decode.py: crops, scales and colours."""

import os

import numpy as np
import pytest
from common.decode import decode
from pictures import RNG, write
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile


def test_the_central_square_is_exact(tmp_path):
    pixels = RNG.integers(0, 256, (32, 48, 3), np.uint8)
    path = write(tmp_path / "a.png", pixels=pixels)
    np.testing.assert_array_equal(decode(path, 32), pixels[:, 8:40])
    with Image.open(path) as image:
        truth = image.resize((12, 12), Image.Resampling.BILINEAR, (10, 2, 38, 30))
    np.testing.assert_array_equal(decode(path, 12, margin=7 / 8), truth)


def test_random_crops_have_the_right_distribution(tmp_path):
    x, y = np.meshgrid(np.arange(240), np.arange(180))
    path = write(tmp_path / "ramp.png", pixels=np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))  # colour is place
    areas, ratios, mirrored, lefts = [], [], [], []
    for seed in range(300):
        pixels = decode(path, 8, seed=(1, seed)).astype(float)
        assert not pixels[..., 2].any()
        across, down = (pixels[0, 6, 0] - pixels[0, 1, 0]) * 8 / 5, (pixels[6, 0, 1] - pixels[1, 0, 1]) * 8 / 5
        areas.append(abs(across) * down / (240 * 180))
        ratios.append(abs(across) / down)
        mirrored.append(across < 0)
        lefts.append(pixels[0, :, 0].min() / 240)
    assert 0.07 < min(areas) < 0.13
    assert 0.8 < max(areas) < 1.02
    # The means of a million draws, where crops that do not fit are drawn again; 300 draws lie within 4 standard errors.
    assert abs(np.mean(areas) - 0.432) < 0.05
    assert abs(np.mean(np.log(ratios)) - 0.031) < 0.04
    assert abs(np.mean(lefts) - 0.219) < 0.05
    assert 0.72 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.37
    assert 0.4 < np.mean(mirrored) < 0.6


def test_where_no_crop_fits_the_central_square_is_taken(tmp_path):
    pixels = RNG.integers(0, 256, (200, 4, 3), np.uint8)
    path = write(tmp_path / "thin.png", pixels=pixels)
    middle = pixels[98:102]
    for seed in range(4):
        found = decode(path, 4, seed=(seed,))
        assert (found == middle).all() or (found == middle[:, ::-1]).all()


def test_a_large_jpeg_is_decoded_at_a_reduced_scale(tmp_path, monkeypatch):
    path, decoded = write(tmp_path / "a.jpg", 500, 375), []
    full = np.asarray(Image.open(path).resize((48, 48), Image.Resampling.BILINEAR, (62.5, 0, 437.5, 375)), int)
    draft = JpegImageFile.draft

    def spy(image, *arguments):
        draft(image, *arguments)
        decoded.append(image.size)

    monkeypatch.setattr(JpegImageFile, "draft", spy)
    assert np.abs(decode(path, 48) - full).mean() < 1
    assert decoded == [(125, 94)]  # a quarter; an eighth would have fewer than 48 pixels


def test_grey_and_transparent_images_become_rgb(tmp_path):
    grey = RNG.integers(0, 256, (8, 8), np.uint8)
    np.testing.assert_array_equal(decode(write(tmp_path / "grey.jpg", pixels=np.full((8, 8), 7, np.uint8)), 8), 7)
    np.testing.assert_array_equal(decode(write(tmp_path / "grey.png", pixels=grey), 8), np.stack([grey] * 3, -1))
    four = RNG.integers(0, 256, (8, 8, 4), np.uint8)
    np.testing.assert_array_equal(decode(write(tmp_path / "four.png", pixels=four), 8), four[..., :3])


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path):
    Image.new("1", (10_000, 5_001)).save(tmp_path / "large.png")
    os.truncate(tmp_path / "large.png", 100)  # without pixels
    with pytest.raises(ValueError, match="10000 x 5001 pixels are more than 50,000,000"):
        decode(str(tmp_path / "large.png"), 32)


def test_more_than_8_bits_a_channel_raise(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(path)
    with pytest.raises(ValueError, match="has the mode I;16, of more than 8 bits; convert it to 8 bits"):
        decode(path, 8)
