"""Assignment of items to files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.checkpoint.saving.planning import Item, assign

ITEMS = st.lists(
    st.builds(
        Item,
        st.sampled_from(["model.a", "model.optimizer_gate", "optimizer.b", "c"]),
        st.none() | st.integers(0, 10**6),
    ),
    max_size=30,
)


@given(ITEMS, st.integers(1, 5), st.none() | st.just("optimizer"))
def test_each_item_is_in_one_nonempty_file(items: list[Item], buckets: int, hint: str | None) -> None:
    found = assign(items, "__3_", buckets, hint)
    assert sorted(place for bucket in found for place in bucket.items) == list(range(len(items)))
    assert all(bucket.items for bucket in found)
    own = [bucket for bucket in found if bucket.name.startswith("optimizer")]
    assert len(own) <= buckets
    assert len(found) - len(own) <= buckets
    assert [bucket.name for bucket in found if bucket not in own] == [
        f"__3_{number}.distcp" for number in range(len(found) - len(own))
    ]
    assert [bucket.name for bucket in own] == [f"optimizer__3_{number}.distcp" for number in range(len(own))]
    for bucket in found:
        assert {hint is not None and items[place].name.startswith(hint) for place in bucket.items} == {bucket in own}
        sizes = [items[place].nbytes for place in bucket.items]
        tensors = [size for size in sizes if size is not None]
        assert tensors == sorted(tensors, reverse=True)
        assert sizes == tensors + [None] * (len(sizes) - len(tensors))  # tensors come first


@given(ITEMS, st.integers(1, 5))
def test_no_file_is_longer_than_it_need_be(items: list[Item], buckets: int) -> None:
    """The last item goes into the emptiest file, which then held no more than an even share of the others."""
    tensors = [item.nbytes for item in items if item.nbytes is not None]
    loads = [sum(items[place].nbytes or 0 for place in bucket.items) for bucket in assign(items, "p", buckets)]
    largest = max(tensors, default=0)
    assert max(loads, default=0) <= sum(tensors) / buckets + (1 - 1 / buckets) * largest + 1e-6


def test_a_hint_that_is_no_file_name() -> None:
    found = assign([Item("a/../b", 1)], "__0_", 2, "a/../b")
    assert [bucket.name for bucket in found] == ["a____b__0_0.distcp"]
