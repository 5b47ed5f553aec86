"""Block hashes: the CBOR against the vectors of RFC 8949, the chain against its own definition, and frozen values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.hashing import ROOT, block_hash, block_hashes, cbor, first_extra

RFC_8949 = [
    (0, "00"),
    (23, "17"),
    (24, "1818"),
    (255, "18ff"),
    (256, "190100"),
    (65535, "19ffff"),
    (65536, "1a00010000"),
    (2**32 - 1, "1affffffff"),
    (2**32, "1b0000000100000000"),
    (2**64 - 1, "1bffffffffffffffff"),
    (-1, "20"),
    (-100, "3863"),
    (-(2**64), "3bffffffffffffffff"),
    (True, "f5"),
    (False, "f4"),
    (None, "f6"),
    (b"", "40"),
    (b"\x01\x02\x03\x04", "4401020304"),
    ("IETF", "6449455446"),
    ("\u00fc", "62c3bc"),
    ([], "80"),
    ([1, [2, 3], (4, 5)], "8301820203820405"),
    ({}, "a0"),
    ({"a": 1, "b": [2, 3]}, "a26161016162820203"),
    (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
]


@pytest.mark.parametrize(("value", "expected"), RFC_8949)
def test_cbor_gives_the_bytes_of_the_rfc(value, expected):
    assert cbor(value).hex() == expected


def test_cbor_sorts_map_keys_by_their_encoding():
    assert cbor({"bb": 1, "a": 2}) == cbor({"a": 2, "bb": 1}) == bytes.fromhex("a261610262626201")


@pytest.mark.parametrize("value", [1.5, {1, 2}, object()])
def test_cbor_refuses_what_has_no_canonical_form(value):
    with pytest.raises(TypeError, match="canonical"):
        cbor(value)


def test_cbor_refuses_more_than_64_bits():
    with pytest.raises(ValueError, match="64 bits"):
        cbor(2**64)


def test_block_hash_is_sha256_over_cbor_of_parent_tokens_extra():
    tokens = np.arange(16, dtype=np.int32)
    written = cbor([ROOT, tokens.tobytes(), ["salt", b"s"]])
    assert block_hash(ROOT, tokens, ("salt", b"s")) == hashlib.sha256(written).digest()
    assert block_hash(ROOT, tokens) == hashlib.sha256(cbor([ROOT, tokens.tobytes(), []])).digest()


def test_hashes_are_the_same_in_every_release():
    tokens = np.arange(40, dtype=np.int32)
    assert [h.hex()[:16] for h in block_hashes(tokens, 16)] == FROZEN
    assert [h.hex()[:16] for h in block_hashes(tokens, 16, salt=b"tenant")] == FROZEN_SALTED


FROZEN = ["950a043a6f1af6f2", "2d50d99af6c47c3c"]
FROZEN_SALTED = ["030030a500705897", "d2380c8bd09e789e"]


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=80),
    st.integers(1, 20),
    st.binary(max_size=8),
)
def test_a_chain_is_its_blocks_hashed_one_after_the_other(ids, block_size, salt):
    tokens = np.array(ids, dtype=np.int32)
    parent, expected = ROOT, []
    for i in range(len(ids) // block_size):
        parent = block_hash(parent, tokens[i * block_size : (i + 1) * block_size], first_extra(salt) if i == 0 else ())
        expected.append(parent)
    assert block_hashes(tokens, block_size, salt=salt) == expected


def test_salt_separates_every_block_of_the_chain():
    tokens = np.zeros(64, dtype=np.int32)
    plain, salted = block_hashes(tokens, 16), block_hashes(tokens, 16, salt=b"a")
    assert not set(plain) & set(salted)
    assert len(set(plain)) == 4  # equal tokens at different positions differ through their parents
