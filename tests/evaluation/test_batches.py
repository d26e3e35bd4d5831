"""Which requests share a batch."""

from finch.evaluation.batches import Limits, Row, form_batches, group_rows, logits_to_keep


def test_rows_are_sorted_by_length():
    rows = group_rows([([1, 2], [3, 4]), ([1], [2]), ([5, 6, 7], [8, 9])], max_length=100)
    assert [(row.indices, row.length, row.scored) for row in rows] == [([2], 4, 2), ([0], 3, 2), ([1], 1, 1)]


def test_choices_of_one_token_share_a_row():
    requests = [([1, 2, 3], [letter]) for letter in (10, 11, 12, 13)]
    assert group_rows(requests, max_length=100) == [Row([0, 1, 2, 3], 3, 1)]


def test_rows_end_at_the_models_context():
    assert group_rows([(list(range(50)), [1, 2])], max_length=8) == [Row([0], 8, 2)]


def test_kept_logits_reach_every_scored_token():
    # Padded on the right: a row of 4 in a batch of 10 ends 6 positions before the end.
    assert logits_to_keep([Row([0], 10, 1), Row([1], 4, 3)]) == 9
    assert logits_to_keep([Row([0], 10, 2)]) == 2


def test_batches_stay_within_each_limit():
    rows = [Row([index], length) for index, length in enumerate((9, 8, 8, 3, 2, 1))]

    def sizes(limits):
        return [len(batch) for batch in form_batches(rows, limits, lambda batch: 10 * len(batch))]

    assert sizes(Limits(4)) == [4, 2]
    assert sizes(Limits(4, tokens=18)) == [2, 2, 2]
    assert sizes(Limits(4, tokens=1)) == [1] * 6
    assert sizes(Limits(64, bytes=30)) == [3, 3]
