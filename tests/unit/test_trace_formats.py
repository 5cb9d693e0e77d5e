"""Every layout that is read, by excerpts written by hand, and what is said of wrong files."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from batchrun.errors import DataError
from batchrun.simulator.traces.reading import (
    Drawing,
    TraceFormat,
    detect_format,
    read_rates,
    read_trace,
    save_trace,
)
from batchrun.simulator.traces.trace import Trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_2023 = AZURE_HEADER + (
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = AZURE_HEADER + (
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n"
    "2024-05-10 00:00:01+00:00,76,15\n"
)
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT = BURST_HEADER + (
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,0,0,0,Conversation log\n"
    "118,GPT-4,417,276,693,Conversation log\n"
)
BURSTGPT_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "0.5,,1.25,ChatGPT,472,18,490,API log\n"
    "2.5,7,0.5,GPT-4,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 500, "output_length": 9, "hash_ids": [0]}\n'
)
SERVEGEN = "0,0,0,,0,0\n600,2.0,1.0,Gamma,1.0,0.5\n1200,1.0,2.88,Weibull,0.64,0.6\n"
RATES = (
    "time_s,rate_per_s,cv,prompt_median_tokens,prompt_sigma,output_median_tokens,output_sigma\n"
    "0,2,1,100,0,10,0\n"
    "600,8,3,200,0,,\n"
)

FORMATS = {
    "azure 2023": (AZURE_2023, TraceFormat.AZURE),
    "azure 2024": (AZURE_2024, TraceFormat.AZURE),
    "burstgpt 1": (BURSTGPT, TraceFormat.BURSTGPT),
    "burstgpt 2": (BURSTGPT_2, TraceFormat.BURSTGPT),
    "mooncake": (MOONCAKE, TraceFormat.MOONCAKE),
    "servegen": (SERVEGEN, TraceFormat.SERVEGEN),
    "rates": (RATES, TraceFormat.RATES),
    "a table's rates": ('\ufeff"time_s","rate_per_s"\n"0","2"\n"60","2"\n', TraceFormat.RATES),
    "mooncake with a mark": ("\ufeff" + MOONCAKE, TraceFormat.MOONCAKE),
    "a table of servegen": ("\ufeff" + SERVEGEN, TraceFormat.SERVEGEN),
}


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def tar_of(**members: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(f"data/{name}-trace.csv")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return content.getvalue()


@pytest.mark.parametrize(("text", "kind"), FORMATS.values(), ids=FORMATS)
def test_a_file_is_known_by_its_content_packed_or_not(
    tmp_path: Path, text: str, kind: TraceFormat
) -> None:
    plain = write(tmp_path, text)
    packed = write(tmp_path, gzip.compress(text.encode()), "packed")

    assert detect_format(plain) is detect_format(packed) is kind
    assert read_trace(plain).arrival_s.tolist() == read_trace(packed, kind).arrival_s.tolist()


def test_our_own_file_is_known_and_whole(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    path = tmp_path / "own"
    save_trace(trace, path)

    again = read_trace(path)

    assert detect_format(path) is TraceFormat.BATCHRUN
    assert (again.source, again.duration_s) == (trace.source, trace.duration_s)
    assert again.prefix is not None and again.prefix.block_tokens == 512
    assert again.prefix.of_request(0).tolist() == [0, 1]


def test_azure_times_are_read_with_and_without_a_zone(tmp_path: Path) -> None:
    old, new = (read_trace(write(tmp_path, text)) for text in (AZURE_2023, AZURE_2024))

    assert old.arrival_s == pytest.approx([0, 4.314579, 4.541877], abs=1e-6)
    assert old.num_prompt_tokens.tolist() == [374, 396, 879]
    assert old.num_output_tokens.tolist() == [44, 109, 55]
    assert new.arrival_s == pytest.approx([0, 0.007405, 0.99007], abs=1e-6)


def test_azure_times_are_instants_in_any_zone(tmp_path: Path) -> None:
    times = (
        "2024-05-10T00:00:00Z", "2024-05-10 02:00:01+02:00", "2024-05-09 18:30:02.5-0530",
        "2024-05-10 00:00:04", "2024-05-10 01:00:08+01",
    )  # fmt: skip
    text = AZURE_HEADER + "".join(f"{time},1,1\n" for time in times)

    assert read_trace(write(tmp_path, text)).arrival_s == pytest.approx([0, 1, 2.5, 4, 8])


def test_failed_calls_of_mooncake_are_left_out(tmp_path: Path) -> None:
    failed = '{"timestamp": 9, "input_length": 600, "output_length": 0}\n'
    trace = read_trace(write(tmp_path, MOONCAKE + failed))

    assert trace.arrival_s.tolist() == [0, 3]
    assert trace.prefix is not None and trace.prefix.of_request(1).tolist() == [0]


def test_failed_calls_of_burstgpt_are_left_out(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.arrival_s.tolist() == [0, 113]
    assert trace.num_output_tokens.tolist() == [18, 276]
    assert read_trace(write(tmp_path, BURSTGPT_2)).arrival_s.tolist() == [0, 2]


def test_mooncake_without_hashes_has_no_prefixes(tmp_path: Path) -> None:
    text = MOONCAKE.replace(', "hash_ids": [0]', "")
    assert read_trace(write(tmp_path, text)).prefix is None


def test_an_unsorted_file_is_sorted(tmp_path: Path) -> None:
    lines = AZURE_2024.splitlines(keepends=True)
    trace = read_trace(write(tmp_path, "".join([lines[0], *lines[:0:-1]])))
    assert trace.num_prompt_tokens.tolist() == [2162, 2399, 76]


def test_rates_are_drawn_as_written(tmp_path: Path) -> None:
    path = write(tmp_path, RATES)
    trace = read_trace(path, drawing=Drawing(seed=1))
    calm, busy = trace.between(0, 600), trace.between(600, 1_200)

    assert trace.duration_s == 1_200
    assert calm.rate_per_s == pytest.approx(2, rel=0.1)
    assert busy.rate_per_s == pytest.approx(8, rel=0.15)
    gaps_s = np.diff(busy.arrival_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(3, rel=0.15)
    assert set(calm.num_prompt_tokens) == {100} and set(calm.num_output_tokens) == {10}
    assert set(busy.num_prompt_tokens) == {200} and len(set(busy.num_output_tokens)) > 20


def test_rates_begin_at_0_whatever_their_clock(tmp_path: Path) -> None:
    path = write(tmp_path, "time_s,rate_per_s\n1760000000,2\n1760003600,2\n")
    late = SERVEGEN.replace("1200,", "1800,").replace("600,", "1500,", 1).replace("0,0", "900,0", 1)
    clients = write(tmp_path, tar_of(a=SERVEGEN.replace("0,0,0", "300,0,0", 1), b=late), "clients")
    trace = read_trace(path)

    assert (trace.duration_s, trace.arrival_s[0] < 60) == (7_200, True)
    assert [each.edges_s[0] for each in read_rates(clients)] == [0, 600]
    assert read_trace(clients, drawing=Drawing(to_s=400)).duration_s == 400


def test_rates_are_cut_scaled_and_drawn_from_a_trace(tmp_path: Path) -> None:
    like = Trace.of([0, 1], [7, 8], [1, 2])
    drawing = Drawing(seed=1, rate=0.5, from_s=300, to_s=900, like=like)
    trace = read_trace(write(tmp_path, RATES), drawing=drawing)

    assert trace.duration_s == 600
    assert len(trace.between(0, 300)) == pytest.approx(300, rel=0.2)
    assert len(trace.between(300, 600)) == pytest.approx(1_200, rel=0.2)
    assert set(trace.num_prompt_tokens) == {7, 8}


def test_the_clients_of_a_tar_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, tar_of(a=SERVEGEN, b=SERVEGEN))
    trace = read_trace(path, drawing=Drawing(seed=2))

    assert detect_format(path) is TraceFormat.SERVEGEN
    assert len(read_rates(path)) == 2
    assert len(trace.between(0, 600)) == 0
    assert len(trace.between(600, 1_200)) == pytest.approx(2_400, rel=0.1)
    assert len(trace.between(1_200, 1_800)) == pytest.approx(1_200, rel=0.2)


def test_more_calls_than_fit_are_not_drawn(tmp_path: Path) -> None:
    path = write(tmp_path, "time_s,rate_per_s\n0,1e6\n600,1e6\n")
    with pytest.raises(DataError, match=r"about 1,200,000,000 calls; at most .* scale the rate"):
        read_trace(path)
    assert len(read_trace(path, drawing=Drawing(rate=1e-6))) == pytest.approx(1_200, rel=0.2)


WRONG = {
    "nothing": ("", "line 1: not the beginning of a trace"),
    "other text": ("hello\n", "line 1: not the beginning of a trace"),
    "a time": (AZURE_HEADER + "\n\nyesterday,1,2\n", "line 4: TIMESTAMP must be .*'yesterday'"),
    "too few values": (AZURE_2024 + "2024-05-10 0\n", "line 5: TIMESTAMP must be a time"),
    "no number": (BURSTGPT + "9,m,x,1,1,log\n", "line 5: Request tokens must be .* count, not 'x'"),
    "below 0": (BURSTGPT + "9,m,1,-1,1,log\n", "line 5: Response tokens must be .*, not '-1'"),
    "an endless time": (BURSTGPT + "inf,m,1,1,1,log\n", "line 5: Timestamp must .*, not 'inf'"),
    "three too many": ("time_s,rate_per_s\n0,1,2,3,4\n60,5\n", "line 2: more values than the 2"),
    "a decimal comma": ("time_s,rate_per_s\n0,1\n60,0,5\n", "line 3: more values than the 2 col"),
    "an empty value": (BURSTGPT + "\n,m,,,,log\n", "line 6: Timestamp must be a number"),
    "no calls": (AZURE_HEADER, "has no calls"),
    "only failed calls": (BURST_HEADER + "5,m,0,0,0,log\n", "no call in it has prompt and output"),
    "no JSON": (MOONCAKE + "{oops\n", "line 3: not a call"),
    "a JSON key": (MOONCAKE + '\n{"timestamp": 1}\n', "line 4: not a call: .*input_length"),
    "an empty prompt": (
        '{"timestamp": 1, "input_length": 0, "output_length": 1}', "no call in it has prompt and"
    ),
    "a length below 0": (
        '{"timestamp": 1, "input_length": -1, "output_length": 1}', "line 1: .*input_length"
    ),
    "a length beyond words": (
        MOONCAKE.replace("600", "9223372036854775808"), "line 1: .*input_length"
    ),
    "tokens beyond words": (
        AZURE_HEADER + "2024-05-10 00:00:00,9223372036854775807,1\n",
        "line 2: ContextTokens must be a token count"
    ),
    "blocks": (MOONCAKE.replace("600", "512"), "request 1 has more prefix blocks"),
    "a rate": ("time_s,rate_per_s\n0,1\n60,-1\n", "line 3: rate_per_s must be a number, 0 or"),
    "a cv": ("time_s,rate_per_s,cv\n0,1,0\n60,1,1\n", "line 2: cv must be a number, above 0"),
    "a cv near 0": ("time_s,rate_per_s,cv\n0,1,1e-200\n60,1,1\n", "line 2: cv must be a number, "),
    "a great cv": ("time_s,rate_per_s,cv\n0,1,1\n60,1,1e9\n", "line 3: cv must .* at most 100"),
    "a shape near 0": (SERVEGEN + "1800,1,1,Weibull,1e-3,1\n", "line 4: shape must be .* Weibull"),
    "a column": ("time_s,rate_per_s,colour\n0,1,2\n", "line 1: column 'colour'"),
    "a window": ("time_s,rate_per_s\n0,1\n", "at least two windows"),
    "time turned": ("time_s,rate_per_s\n0,1\n60,1\n60,2\n", "window at 60 s does not follow"),
    "a family": (SERVEGEN + "1800,1,1,Pareto,1,1\n", "line 4: family must be .*, not 'Pareto'"),
    "a tar without": (tar_of(), "not the beginning of a trace|no .*-trace.csv in it"),
    "a broken gzip": (gzip.compress(AZURE_2024.encode() * 99)[:60], "cannot read the trace"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_line_that_names_the_place(
    tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=says) as caught:
        read_trace(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_named_format_is_taken_at_its_word(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: no column TIMESTAMP"):
        read_trace(write(tmp_path, BURSTGPT), TraceFormat.AZURE)
    with pytest.raises(DataError, match="cannot read the trace: No such file"):
        read_trace(tmp_path / "none")
