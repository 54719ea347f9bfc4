"""How much of a KV cache is lent after preemptions, and when that grows again."""

from workers.policy.kv_share import GROW, LEAST, KvShare


def test_what_was_preempted_before_we_looked_is_no_news() -> None:
    """The engine may be one that others use, or that was told to go on."""
    assert KvShare().looked(7) == KvShare(part=1.0, preemptions=7)


def test_each_look_with_a_preemption_takes_a_fifth() -> None:
    """However many there were, and never below the least."""
    share = KvShare().looked(0).looked(5)
    assert share.part == 0.8
    for preemptions in range(6, 20):
        share = share.looked(preemptions)
    assert share.part == LEAST


def test_what_was_taken_grows_back_slowly() -> None:
    """To the whole, and no further; an engine that counts from zero again has preempted nobody."""
    share = KvShare(part=0.8, preemptions=5)
    assert share.looked(5).part == 0.8 + GROW
    assert share.looked(0) == KvShare(part=0.8 + GROW, preemptions=0)
    for _ in range(100):
        share = share.looked(5)
    assert share.part == 1.0
