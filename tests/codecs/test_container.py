"""Files that are truncated, damaged, foreign, newer, or lie about lengths; and saves that are interrupted."""

import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
import zlib

import pytest

from verkv.codecs import container, lossless
from verkv.codecs.container import Container, MemorySections, Section, SectionKey, write_container
from verkv.codecs.errors import CodecError, CorruptFileError, FormatError, VersionError

HUGE = 2**60
KEYS = [SectionKey(4, 0, 0, block, side) for block in range(2) for side in range(2)]


def sections():
    return [(key, Section(bytes([number]) * (50 + 30 * number), 50 + 30 * number)) for number, key in enumerate(KEYS)]


@pytest.fixture
def path(tmp_path):
    write_container(tmp_path / "context", {"name": "value"}, sections())
    return tmp_path / "context"


def rewrite(path, header=None, entries=None, **prefix):
    """Change fields of a file's head and make its checksum right again."""
    data = path.read_bytes()
    fields = list(container.PREFIX.unpack_from(data))
    names = ["magic", "version", "flags", "header_length", "n_sections", "file_length", "checksum", "zero"]
    n_header, n_sections = fields[3], fields[4]
    start = container.PREFIX.size
    encoded = data[start : start + n_header] if header is None else header
    table = [
        list(container.ENTRY.unpack_from(data, start + n_header + i * container.ENTRY.size)) for i in range(n_sections)
    ]
    for (number, field), value in (entries or {}).items():
        table[number][field] = value
    rest = encoded + b"".join(container.ENTRY.pack(*entry) for entry in table)
    rest += bytes(-(start + len(rest)) % container.ALIGNMENT)
    old_head = -(-(start + n_header + n_sections * container.ENTRY.size) // container.ALIGNMENT) * container.ALIGNMENT
    assert start + len(rest) == old_head, "keep the header's length when you change it"
    for name, value in prefix.items():
        fields[names.index(name)] = value
    fields[6] = 0
    fields[6] = zlib.crc32(rest, zlib.crc32(container.PREFIX.pack(*fields)))
    path.write_bytes(container.PREFIX.pack(*fields) + rest + data[old_head:])


def read_all(path):
    with Container(path) as file:
        return {key: file.read(key, 50 + 30 * number) for number, key in enumerate(KEYS)}


def test_what_was_written_is_read(path):
    assert read_all(path) == {key: section.data for key, section in sections()}
    with Container(path) as file:
        assert file.header == {"name": "value"} and list(file) == KEYS
        lengths = [(key, file.stored_length(key)) for key in file]
        assert file.n_bytes == path.stat().st_size == container.container_length(file.header, lengths)


def test_every_truncation_is_noticed(path):
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(CodecError, match="truncated" if length > 3 else "not a stored context|truncated"):
            Container(path)


def test_every_flipped_byte_is_noticed(path):
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :])
        with pytest.raises(CodecError), Container(path) as file:
            file.verify()


def test_bytes_behind_the_end_are_noticed(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptFileError):
        Container(path)


@pytest.mark.parametrize("content", [b"", b"VKV", b"PK\3\4" + bytes(100), b"{}", bytes(200)])
def test_foreign_files_are_named_as_such(tmp_path, content):
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(CodecError):
        Container(tmp_path / "foreign")
    with pytest.raises(FormatError):
        Container(tmp_path / "missing")


def test_a_newer_version_is_named_as_such(path):
    rewrite(path, version=2)
    with pytest.raises(VersionError, match="version 2"):
        Container(path)


@pytest.mark.parametrize("field", ["header_length", "n_sections", "file_length"])
def test_huge_lengths_in_the_prefix_allocate_nothing(path, field):
    rewrite(path, **{field: HUGE})
    tracemalloc.start()
    with pytest.raises(CorruptFileError):
        Container(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("field", [7, 8])  # offset, stored length
def test_huge_lengths_in_the_table_allocate_nothing(path, field):
    rewrite(path, entries={(1, field): HUGE})
    with pytest.raises(CorruptFileError, match="table"):
        Container(path)


def test_a_huge_raw_length_is_compared_before_anything_is_inflated(path):
    rewrite(path, entries={(1, 9): HUGE})
    with Container(path) as file, pytest.raises(CorruptFileError, match="holds"):
        file.read(KEYS[1], 80)


def test_two_entries_of_one_section_are_refused(path):
    rewrite(path, entries={(1, field): 0 for field in (3, 4)})
    with pytest.raises(CorruptFileError, match="table"):
        Container(path)


@pytest.mark.parametrize("header", [b'["list","1"]    ', b'{"name":"value" ', b"\xff" * 16, b"[" * 16])
def test_a_header_that_is_no_object_is_refused(path, header):
    rewrite(path, header=header)
    with pytest.raises(CorruptFileError):
        Container(path)


def test_the_length_of_the_header_fits_the_tests_above(path):
    assert len(json.dumps({"name": "value"}, separators=(",", ":"))) == 16


def test_missing_sections_are_an_error(path):
    with Container(path) as file, pytest.raises(CorruptFileError, match="missing"):
        file.read(SectionKey(4, 7), 10)
    with pytest.raises(CorruptFileError, match="missing"):
        MemorySections().read(SectionKey(4, 7), 10)


@pytest.mark.parametrize("name", ["none", "deflate", "huffman"])
def test_lossless_compression_is_lossless(name):
    data = bytes(range(256)) * 20
    stored = lossless.compress(name, data)
    assert lossless.decompress(lossless.FORMATS[name], stored, len(data)) == data
    assert (len(stored) < len(data)) == (name == "deflate")
    for wrong in (len(data) - 1, len(data) + 1, 0):
        with pytest.raises(CorruptFileError):
            lossless.decompress(lossless.FORMATS[name], stored, wrong)


@pytest.mark.parametrize("name", ["isal", "zstd"])
def test_optional_compressors_work_or_say_what_to_install(name):
    try:
        stored = lossless.compress(name, b"abc" * 100)
    except CodecError as error:
        assert "pip install" in str(error)
        with pytest.raises(CodecError, match="pip install"):
            lossless.check_lossless(name)
        pytest.skip(str(error))
    assert lossless.decompress(lossless.FORMATS[name], stored, 300) == b"abc" * 100


def test_a_bomb_is_not_inflated():
    bomb = zlib.compress(bytes(2**26), 9)
    tracemalloc.start()
    with pytest.raises(CorruptFileError):
        lossless.decompress(lossless.DEFLATE, bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_truncated_streams_are_refused():
    stored = zlib.compress(bytes(range(256)) * 4)
    for length in range(len(stored)):
        with pytest.raises(CorruptFileError):
            lossless.decompress(lossless.DEFLATE, stored[:length], 1024)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_save_leaves_the_previous_file(path, monkeypatch, step):
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(container.os, "fsync", fail) if step == "fsync" else monkeypatch.setattr(
        container.Path, "replace", fail
    )
    with pytest.raises(OSError, match="no space"):
        write_container(path, {"name": "other"}, sections()[:1])
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_process_that_dies_while_saving_leaves_the_previous_file(path, written):
    before = path.read_bytes()
    code = f"""
        import os
        from verkv.codecs import container
        from verkv.codecs.container import Section, SectionKey, write_container

        filling, calls = container._filling, []

        def dies(length):
            calls.append(length)
            if len(calls) > {written} + 5:  # four checksums and the head come first
                os._exit(9)
            return filling(length)

        container._filling = dies
        sections = [(SectionKey(4, 0, 0, i), Section(bytes(100), 100)) for i in range(4)]
        write_container({str(path)!r}, {{"name": "other"}}, sections)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert path.read_bytes() == before
