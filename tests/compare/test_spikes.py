"""Loss spikes of histories with known spikes."""

import math
import random

import pytest

from kha_megatron.compare.spikes import Spike, SpikeDefinition, find_spikes


def history(count=400, noise=0.02, every=1):
    """Return a loss that falls from 10.8 towards 2, with normal noise."""
    generator = random.Random(3)
    values = []
    for i in range(count):
        loss = 2 + 8.8 * math.exp(-i / 40) + generator.gauss(0, noise)
        values.append((every * (i + 1), loss))
    return values


def raised(values, start, heights):
    """Add a jump of the given heights from the ``start``-th value on."""
    values = list(values)
    for i, height in enumerate(heights, start):
        step, loss = values[i]
        values[i] = (step, loss + height)
    return values


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_falling_noisy_loss_has_no_spike(noise):
    assert find_spikes(history(2000, noise)) == []


@pytest.mark.parametrize("every", [1, 10])
def test_height_peak_and_recovery(every):
    values = raised(history(every=every), 300, [0.5, 1.5, 0.9, 0.4])
    (spike,) = find_spikes(values)
    assert spike.start == 301 * every
    assert spike.peak == 302 * every
    assert spike.end == 305 * every
    assert spike.recovery == 4 * every
    assert spike.level == pytest.approx(2, abs=0.05)
    assert spike.height == pytest.approx(1.5, abs=0.1)


@pytest.mark.fast
def test_exact_numbers_of_a_flat_loss():
    last = [(17, 2.125), (18, 2.25), (19, 2.0625), (20, 2.03125)]
    values = [(i, 2.0) for i in range(1, 17)] + last
    definition = SpikeDefinition(margin=0.125)
    # 2.125 is not more than the margin, and 2.0625 not less than half of it
    expected = Spike(start=18, peak=18, end=20, level=2.0, height=0.25)
    assert find_spikes(values, definition) == [expected]
    assert find_spikes(values, SpikeDefinition(margin=0.25)) == []
    first = find_spikes(values, SpikeDefinition(margin=0.0))[0]
    assert first.start == 17
    values[16] = (17, 2.1250001)
    first = find_spikes(values, definition)[0]
    assert first.start == 17


def test_two_spikes_are_two_and_one_that_swings_is_one():
    values = raised(history(), 300, [1.0] * 3)
    values = raised(values, 320, [0.6])
    assert [s.start for s in find_spikes(values)] == [301, 321]
    swinging = raised(history(noise=0.001), 300, [0.5, 0.08, 0.5, 0.08, 0.5])
    assert [s.recovery for s in find_spikes(swinging)] == [5]


def test_values_inside_a_spike_do_not_move_the_level():
    values = raised(history(500, noise=0.01), 300, [1.0] * 100)
    values = raised(values, 410, [0.3])
    first, second = find_spikes(values)
    assert first.recovery == 100
    assert second.start == 411
    assert second.level == pytest.approx(2, abs=0.1)


def test_a_loss_that_stays_up_is_one_spike_without_recovery():
    (spike,) = find_spikes(raised(history(), 300, [0.8] * 100))
    assert spike.start == 301
    assert spike.end is None
    assert spike.recovery is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_spike_of_infinite_height(bad):
    values = history()
    values[200] = (201, bad)
    values[202] = (203, bad)
    first, second = find_spikes(values)
    assert first.start == 201
    assert first.end == 202
    assert first.height == math.inf
    assert second.start == 203
    assert second.end == 204
    assert second.height == math.inf
    assert find_spikes([(1, bad), *history()[1:]]) == []  # the first values cannot start a spike
