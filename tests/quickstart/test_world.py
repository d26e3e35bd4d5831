from finch.quickstart.world import NEW_RELATIONS, OLD_RELATIONS, new_world, old_world


def words(world):
    return {word.strip("?.").lower() for line in world.text() for word in line.split()}


def test_worlds_have_their_sizes_and_are_deterministic():
    old, new = old_world(), new_world()
    assert (len(old.first_phrasings), len(new.first_phrasings)) == (600, 200)
    assert (len(old.rows), len(new.rows)) == (2400, 800)
    assert old == old_world()


def test_new_world_shares_no_word_with_old():
    assert not words(old_world()) & words(new_world())


def test_a_fact_has_one_answer_in_all_phrasings():
    for world, relations in ((old_world(), OLD_RELATIONS), (new_world(), NEW_RELATIONS)):
        answers = {}
        for row in world.rows:
            answers.setdefault(row["fact"], set()).add(row["answer"])
        assert all(len(choices) == 1 for choices in answers.values())
        questions = [row["question"] for row in world.rows]
        assert len(set(questions)) == len(questions)
        assert {answer for choices in answers.values() for answer in choices} <= {
            answer for _, choices in relations.values() for answer in choices
        }
