from finch.quickstart.world import NEW_RELATIONS, OLD_RELATIONS, new_world, old_world


def words(world):
    return {word.strip("?.").lower() for line in world.text() for word in line.split()}


def test_sizes_and_repeatability():
    old, new = old_world(), new_world()
    assert (len(old.first_phrasings), len(new.first_phrasings)) == (600, 200)
    assert (len(old.rows), len(new.rows)) == (2400, 800)
    assert old == old_world()


def test_the_new_world_shares_no_word_with_the_old():
    assert not words(old_world()) & words(new_world())


def test_a_fact_has_one_answer_however_it_is_asked():
    for world, relations in ((old_world(), OLD_RELATIONS), (new_world(), NEW_RELATIONS)):
        answers = {}
        for row in world.rows:
            answers.setdefault(row["fact"], set()).add(row["answer"])
        assert all(len(found) == 1 for found in answers.values())
        questions = [row["question"] for row in world.rows]
        assert len(set(questions)) == len(questions)
        assert {answer for found in answers.values() for answer in found} <= {
            answer for _, choices in relations.values() for answer in choices
        }
