"""Our assembly of streamed episodes equals the library's, delta by delta."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifiers.v1.serve.delta import EpisodeAssembly as LibraryAssembly
from verifiers.v1.serve.delta import TraceSummary, unpack

from prime_rl.orchestrator import assembly
from prime_rl.orchestrator.arrays import decode_array
from prime_rl.orchestrator.assembly import EpisodeAssembly, LostDelta


def rows(values, dtype):
    array = np.array(values, dtype).reshape(-1, 1, 1)
    return {
        "__nd__": True,
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": array.tobytes(),
    }


@st.composite
def streams(draw):
    """Deltas of up to two traces, as a server that streams every change sends them."""
    deltas = []
    counts: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 10))):
        name = draw(st.sampled_from(["a", "b"]))
        delta: dict = {"trace": name}
        if name not in counts:
            counts[name] = 0
            delta["open"] = {"id": name, "task": {"key": "k"}}
        elif draw(st.integers(0, 9)) == 0:
            del counts[name]
            deltas.append({"trace": name, "discard": True})
            continue
        known = counts[name]
        if known and draw(st.booleans()):
            link = {"node": 0, "type": draw(st.sampled_from(["compaction", "subagent"]))}
            delta["links"] = {draw(st.integers(0, known - 1)): [link]}
        if known and draw(st.booleans()):
            wide = draw(st.booleans())
            row = rows([300], np.uint16) if wide else rows([7], np.uint8)
            delta["routing_repairs"] = {draw(st.integers(0, known - 1)): row}
        new = draw(st.integers(0, 2))
        if new:
            delta["nodes"] = [
                {"parent": None, "routed_experts": rows([n, n + 1], np.uint8)} for n in range(new)
            ]
            if draw(st.booleans()):
                delta["nodes"][0]["semantic_parents"] = [{"node": 0, "type": "x"}]
            counts[name] += new
        if draw(st.booleans()):
            delta["calls"] = [{"usage": None}]
        if draw(st.booleans()):
            delta["set"] = {"ok": draw(st.booleans()), "rewards": {"r": None}}
        if draw(st.booleans()):
            delta["pending"] = [{"role": "user"}]
        deltas.append(delta)
    return deltas


def comparable(trace):
    """Without what only a live watcher wants, and with arrays as arrays."""
    found = {name: value for name, value in trace.items() if name != "pending"}
    found["nodes"] = [
        {
            **node,
            "semantic_parents": node.get("semantic_parents") or [],
            "routed_experts": decode_array(node["routed_experts"]).tolist(),
        }
        for node in trace["nodes"]
    ]
    return found


@given(streams())
@settings(max_examples=200, deadline=None)
def test_every_stream_gives_the_library_s_episode(deltas):
    ours, theirs = EpisodeAssembly(), LibraryAssembly()
    for delta in deltas:
        ours.apply(copy.deepcopy(delta))
        theirs.apply(copy.deepcopy(delta))
        assert list(ours.traces) == list(theirs.traces)
        for name, trace in ours.traces.items():
            assert comparable(trace) == comparable(theirs.traces[name])
    summaries = [
        {"id": name, "nodes": len(trace["nodes"]), "calls": len(trace["calls"])}
        for name, trace in theirs.traces.items()
    ]
    head = {"id": "e", "ok": True}
    finished = ours.finish(head, summaries)
    library = theirs.finish(head, [TraceSummary(**each) for each in summaries])
    assert [comparable(t) for t in finished["traces"]] == [comparable(t) for t in library["traces"]]
    assert finished["id"] == "e"


def test_lost_parts_are_noticed():
    made = EpisodeAssembly()
    made.apply({"trace": "a", "open": {"id": "a"}, "nodes": [{"parent": None}]})
    with pytest.raises(LostDelta, match="trace b never came"):
        made.finish({}, [{"id": "b", "nodes": 0, "calls": 0}])
    with pytest.raises(LostDelta, match="has 1 nodes, the server counts 2"):
        made.finish({}, [{"id": "a", "nodes": 2, "calls": 0}])


def test_the_list_fields_are_those_of_the_library():
    from verifiers.v1.serve.delta import LIST_FIELDS

    assert set(assembly.LISTS) == set(LIST_FIELDS)


def test_the_wire_is_plain_msgpack():
    import msgspec

    packed = msgspec.msgpack.encode({"links": {3: [{"node": 1}]}, "data": b"\x00\xff"})
    assert unpack(packed) == msgspec.msgpack.decode(packed)
