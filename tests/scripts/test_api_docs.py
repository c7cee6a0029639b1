"""docs/api.md tells everything that a client meets, and nothing that is not so."""

import re
from dataclasses import replace

import pytest

from noria.reasons import Reason
from noria.service import limits
from noria.v1 import chat_pb2, common_pb2
from scripts import api_docs, api_facts
from scripts.documented import Value, read_protos


@pytest.fixture(scope="module")
def page():
    return api_docs.page()


@pytest.fixture(scope="module")
def protos():
    return read_protos(["chat", "common", "tokenizer", "worker"])


def section(page, heading):
    """What stands below a heading, up to the next one."""
    return re.split(r"^#+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_method_stands_there_and_whether_it_is_served(page):
    for method in chat_pb2.DESCRIPTOR.services_by_name["ChatService"].methods:
        assert section(page, method.name).strip(), method.name
        served = "no" if api_docs.NOT_YET in section(page, method.name) else "yes"
        assert re.search(rf"^\| \[{method.name}\].* \| {served} \|", page, re.MULTILINE)
    assert api_docs.NOT_YET not in section(page, "StreamChat")


def test_every_field_and_value_of_every_client_message_stands_there_with_a_comment(page, protos):
    methods = protos.services["ChatService"].methods
    ends = [name for method in methods for name in (method.request, method.response)]
    for kind in protos.reachable(ends):
        members = kind.fields if hasattr(kind, "fields") else kind.values[1:]
        for member in members:
            assert member.comment, f"{kind.name}.{member.name}"
            name = member.name.removeprefix("REASON_")
            assert f"| `{name}` |" in page, f"{kind.name}.{member.name}"


def test_the_comments_belong_to_what_they_stand_at(page):
    spec = section(page, "ChatSpec")
    assert "| `max_tokens` | uint32, *optional* | Length of the answer at most" in spec
    assert "| `messages` | list of [Message](#message) | The conversation, oldest first" in spec
    delta = section(page, "ContentBlockDelta")
    assert "| `text` | string, one of *delta* | Of a text block." in delta
    bias = section(page, "SamplingParams")
    assert "| `logit_bias` | map of uint32 to float |" in bias


def test_every_reason_and_every_limit_stands_there(page):
    for reason in Reason:
        assert page.count(f"| `{reason.value}` |") == 1
    for name in vars(limits):
        if name.isupper():
            assert page.count(f"| `{name}` |") == 1
    assert "| `MAX_CHAT_BYTES` | 4 MiB | " in page
    assert "| `DEFAULT_DEADLINE_S` | 600 s | " in page
    assert "| `MIN_PRIORITY` | -100 | The lowest priority. |" in page


def test_every_link_within_the_page_leads_somewhere_and_no_two_headings_are_alike(page):
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors)
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert links <= {*anchors, *re.findall(r'<a id="(\w+)">', page)}


def test_every_file_that_it_names_is_there(page):
    for target in re.findall(r"\]\((\.\.[^)#]+)", page):
        assert (api_docs.PAGE.parent / target).exists(), target


def test_only_what_the_router_refuses_is_marked_as_refused(page):
    unsupported = api_facts.unsupported_fields()
    assert ("ChatSpec", "messages") not in unsupported
    assert ("ChatSpec", "max_tokens") not in unsupported
    assert ("SamplingParams", "temperature") not in unsupported
    assert ("ContentBlock", "text") not in unsupported
    for message, field in unsupported:
        row = re.search(rf"^\| `{field}` .*$", section(page, message), re.MULTILINE)
        assert api_docs.NOT_YET in row[0]


def test_a_status_in_the_proto_that_is_not_the_one_sent_is_refused(protos):
    enum = protos.types["Reason"]
    wrong = Value("REASON_INVALID_KEY", "The key is unknown. NOT_FOUND.", "")
    with pytest.raises(SystemExit, match="REASON_INVALID_KEY: sent with UNAUTHENTICATED"):
        list(api_facts.reason_rows(replace(enum, values=(enum.values[0], wrong))))


def test_reasons_are_those_of_the_wire(protos):
    names = [value.name for value in protos.types["Reason"].values]
    assert names == [name for name, _ in common_pb2.Reason.items()]


def test_a_stale_or_missing_page_is_refused(page, tmp_path, monkeypatch):
    written = tmp_path / "api.md"
    monkeypatch.setattr(api_docs, "PAGE", written)
    monkeypatch.setattr("sys.argv", ["api_docs", "--check"])
    with pytest.raises(SystemExit, match="make docs"):
        api_docs.main()
    written.write_text(page, "utf-8")
    api_docs.main()
    written.write_text(page + "more", "utf-8")
    with pytest.raises(SystemExit, match="make docs"):
        api_docs.main()
