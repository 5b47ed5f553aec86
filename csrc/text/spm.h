// SentencePiece BPE with byte fallback: text to token ids, straight from pieces and scores, without a list of merges.
// A pair of neighbours may merge when the piece spelled by both exists; the best score goes first. Immutable, so any
// number of threads may encode at once. Used by serving.tokens_spm through bindings.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace trireme::text {

// What a token may do. kPlain merges; kAdded is found in raw text before anything else; kSpecial likewise, if allowed.
enum class Kind : uint8_t { kPlain = 0, kInert = 1, kAdded = 2, kSpecial = 3 };

class Spm {
 public:
  // `tokens` in id order, one score and one kind each. `unknown` is the id for characters that nothing spells, or -1: these
  // are left out. With `space_prefix` each stretch of text between added tokens gets a space in front.
  // Throws std::invalid_argument for a token that occurs twice and for a score that is not a number.
  Spm(std::vector<std::string> tokens, const double* scores, const uint8_t* kinds, int32_t unknown, bool space_prefix);

  // Ids of UTF-8 text. Without `allow_special` the names of special tokens are ordinary text.
  std::vector<int32_t> encode(std::string_view text, bool allow_special) const;

  // Id of the token spelled exactly so, or -1.
  int32_t find(std::string_view token) const;

  const std::string& token(int32_t id) const { return tokens_[id]; }
  int32_t num_tokens() const { return static_cast<int32_t>(tokens_.size()); }

 private:
  struct Slot {
    uint32_t tag;
    int32_t id;
  };
  struct Symbol {
    int32_t id;
    int32_t prev;
    int32_t next;
  };
  struct Merge {
    double score;
    int32_t num_left, num_right;  // characters of both parts
    int32_t id;
    int32_t at;
  };

  static bool is_later(const Merge& a, const Merge& b);

  uint64_t hash_of(std::string_view text) const;
  int32_t find_pair(int32_t left, int32_t right) const;
  void add_name(int32_t id);
  int32_t match_name(std::string_view text, size_t at) const;
  void encode_stretch(std::string_view text, std::vector<int32_t>& out) const;
  void split_characters(std::string_view text, std::vector<Symbol>& symbols) const;
  void merge_all(std::vector<Symbol>& symbols) const;

  std::vector<std::string> tokens_;
  std::vector<double> scores_;
  std::vector<Kind> kinds_;
  std::vector<uint64_t> hashes_;
  std::vector<int32_t> num_chars_;
  std::vector<uint64_t> powers_;  // of the base of hash_of, up to the longest token
  std::vector<Slot> slots_;       // open addressing, a power of two
  int32_t bytes_[256];            // id of <0xNN>, or -1
  int32_t unknown_;
  bool space_prefix_;
  // names of added tokens: edges (node << 8 | byte) of a trie, and the token that ends in a node
  std::unordered_map<uint64_t, int32_t> edges_;
  std::vector<int32_t> ends_;
  bool begins_name_[256] = {};
};

}  // namespace trireme::text
