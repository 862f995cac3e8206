from torch.testing import assert_close


def test_a_tilted_measure_is_the_family_seen_from_its_member(measure, natural):
    first, second = 0.4 * natural, 0.6 * natural
    tilted = measure.tilt(first)
    assert_close(tilted.mean(second), measure.mean(natural), rtol=1e-10, atol=1e-11)
    assert_close(tilted.fisher(second), measure.fisher(natural), rtol=1e-10, atol=1e-11)
    gain = measure.log_normalizer(natural) - measure.log_normalizer(first)
    assert_close(tilted.log_normalizer(second), gain, rtol=1e-10, atol=1e-11)
    assert_close(tilted.log_normalizer(0 * natural), 0 * gain, rtol=0, atol=1e-12)


def test_a_tilt_of_a_tilt_is_the_tilt_by_the_sum(measure, natural):
    twice = measure.tilt(0.4 * natural).tilt(0.35 * natural)
    once = measure.tilt(0.75 * natural)
    rest = 0.25 * natural
    assert_close(twice.mean(rest), once.mean(rest), rtol=1e-10, atol=1e-11)
    assert_close(twice.divergence(rest, 0 * rest), once.divergence(rest, 0 * rest), rtol=1e-9, atol=1e-11)


def test_a_tilt_keeps_the_entropy_of_each_member(measure, natural):
    tilted = measure.tilt(0.4 * natural)
    assert_close(tilted.entropy(0.6 * natural), measure.entropy(natural), rtol=1e-10, atol=1e-10)
