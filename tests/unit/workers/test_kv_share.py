"""How much of a KV cache is used after preemptions, and when the part grows again."""

from workers.policy.kv_share import GROW, LEAST, KvShare


def test_preemptions_from_before_the_first_look_do_not_count() -> None:
    """Others may use the engine, or it may have been adopted."""
    assert KvShare().looked(7) == KvShare(part=1.0, preemptions=7)


def test_each_look_with_a_preemption_takes_a_fifth() -> None:
    """However many there were, and never below the minimum."""
    share = KvShare().looked(0).looked(5)
    assert share.part == 0.8
    for preemptions in range(6, 20):
        share = share.looked(preemptions)
    assert share.part == LEAST


def test_the_part_grows_back_slowly() -> None:
    """It grows to the whole; an engine whose counter restarts at zero has preempted no request."""
    share = KvShare(part=0.8, preemptions=5)
    assert share.looked(5).part == 0.8 + GROW
    assert share.looked(0) == KvShare(part=0.8 + GROW, preemptions=0)
    for _ in range(100):
        share = share.looked(5)
    assert share.part == 1.0
