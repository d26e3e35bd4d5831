import pytest

from finch.errors import UserError, report_user_errors


def leaving(error, **environment):
    @report_user_errors
    def main():
        raise error

    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def test_a_users_mistake_is_one_line(capsys):
    assert leaving(UserError("epochs=0 must be at least 1")) == 1
    assert capsys.readouterr().err.strip() == "finch: error: epochs=0 must be at least 1"


def test_the_sentence_is_also_left_for_whoever_started_the_ranks(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FINCH_ERROR_FILE", str(tmp_path / "error"))
    leaving(KeyboardInterrupt())
    assert not (tmp_path / "error").exists()
    leaving(UserError("epochs=0 must be at least 1"))
    assert (tmp_path / "error").read_text() == "epochs=0 must be at least 1\n"
    monkeypatch.setenv("FINCH_ERROR_FILE", str(tmp_path / "absent" / "error"))
    assert leaving(UserError("epochs=0 must be at least 1")) == 1


def test_ctrl_c(capsys):
    assert leaving(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "finch: interrupted"


def test_our_own_defects_keep_their_traceback():
    @report_user_errors
    def main():
        raise RuntimeError("Connection closed by peer")  # without torchrun this is no lost rank

    with pytest.raises(RuntimeError):
        main()


def test_a_rank_that_lost_a_peer_tells_after_the_peer(capsys, monkeypatch):
    waited = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("finch.errors.time.sleep", waited.append)
    assert leaving(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")) == 1
    assert waited == [5]
    assert "rank 1 stopped because another rank did" in capsys.readouterr().err
