// Building the tables of Spm and encoding with them. The hash of a text is a polynomial in its bytes, so the hash of two
// pieces put together comes from theirs, and trying a pair costs one look into a table.
#include "text/spm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace trireme::text {

namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15ull | 1;
constexpr std::string_view kMeta = "\xE2\x96\x81";

bool begins_character(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) != 0x80; }

size_t slot_of(uint64_t hash, size_t mask) { return (hash ^ (hash >> 29)) * 0xBF58476D1CE4E5B9ull >> 20 & mask; }

}  // namespace

Spm::Spm(std::vector<std::string> tokens, const double* scores, const uint8_t* kinds, int32_t unknown,
         bool space_prefix)
    : tokens_(std::move(tokens)),
      scores_(scores, scores + tokens_.size()),
      kinds_(tokens_.size()),
      hashes_(tokens_.size()),
      num_chars_(tokens_.size()),
      unknown_(unknown),
      space_prefix_(space_prefix),
      ends_(1, -1) {
  size_t longest = kMeta.size();
  for (const std::string& token : tokens_) longest = std::max(longest, token.size());
  powers_.assign(longest + 1, 1);
  for (size_t i = 1; i <= longest; ++i) powers_[i] = powers_[i - 1] * kBase;
  size_t size = 16;
  while (size < 2 * tokens_.size()) size *= 2;
  slots_.assign(size, Slot{0, -1});
  for (int32_t id = 0; id < num_tokens(); ++id) {
    const std::string& token = tokens_[id];
    if (std::isnan(scores_[id])) throw std::invalid_argument("the score of token " + std::to_string(id) + " is NaN");
    if (find(token) >= 0) throw std::invalid_argument("the token \"" + token + "\" appears twice in the vocabulary");
    kinds_[id] = static_cast<Kind>(kinds[id]);
    hashes_[id] = hash_of(token);
    num_chars_[id] = static_cast<int32_t>(std::count_if(token.begin(), token.end(), begins_character));
    size_t slot = slot_of(hashes_[id], size - 1);
    while (slots_[slot].id >= 0) slot = (slot + 1) & (size - 1);
    slots_[slot] = Slot{static_cast<uint32_t>(hashes_[id]), id};
    if (kinds_[id] >= Kind::kAdded && !token.empty()) add_name(id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    bytes_[byte] = find(name);
  }
}

uint64_t Spm::hash_of(std::string_view text) const {
  uint64_t hash = 0;
  for (char byte : text) hash = hash * kBase + static_cast<uint8_t>(byte) + 1;
  return hash;
}

int32_t Spm::find(std::string_view token) const {
  const uint64_t hash = hash_of(token);
  const size_t mask = slots_.size() - 1;
  for (size_t slot = slot_of(hash, mask); slots_[slot].id >= 0; slot = (slot + 1) & mask) {
    const int32_t id = slots_[slot].id;
    if (slots_[slot].tag == static_cast<uint32_t>(hash) && tokens_[id] == token) return id;
  }
  return -1;
}

// Id of the piece that both spell together, if these three may merge, else -1.
int32_t Spm::find_pair(int32_t left, int32_t right) const {
  const std::string& first = tokens_[left];
  const std::string& second = tokens_[right];
  const size_t length = first.size() + second.size();
  if (length >= powers_.size() || kinds_[left] != Kind::kPlain || kinds_[right] != Kind::kPlain) return -1;
  const uint64_t hash = hashes_[left] * powers_[second.size()] + hashes_[right];
  const size_t mask = slots_.size() - 1;
  for (size_t slot = slot_of(hash, mask); slots_[slot].id >= 0; slot = (slot + 1) & mask) {
    if (slots_[slot].tag != static_cast<uint32_t>(hash)) continue;
    const int32_t id = slots_[slot].id;
    const std::string& both = tokens_[id];
    if (both.size() == length && std::memcmp(both.data(), first.data(), first.size()) == 0 &&
        std::memcmp(both.data() + first.size(), second.data(), second.size()) == 0) {
      return kinds_[id] == Kind::kPlain ? id : -1;
    }
  }
  return -1;
}

void Spm::add_name(int32_t id) {
  uint64_t node = 0;
  for (char byte : tokens_[id]) {
    const auto [edge, is_new] = edges_.try_emplace(node << 8 | static_cast<uint8_t>(byte), ends_.size());
    if (is_new) ends_.push_back(-1);
    node = edge->second;
  }
  ends_[node] = id;
  begins_name_[static_cast<uint8_t>(tokens_[id][0])] = true;
}

// The longest added token that begins at `at`, or -1.
int32_t Spm::match_name(std::string_view text, size_t at) const {
  if (!begins_name_[static_cast<uint8_t>(text[at])]) return -1;
  int32_t best = -1;
  uint64_t node = 0;
  for (; at < text.size(); ++at) {
    const auto edge = edges_.find(node << 8 | static_cast<uint8_t>(text[at]));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (ends_[node] >= 0) best = ends_[node];
  }
  return best;
}

std::vector<int32_t> Spm::encode(std::string_view text, bool allow_special) const {
  if (text.size() > std::numeric_limits<int32_t>::max() / 4) throw std::invalid_argument("the text is too long");
  std::vector<int32_t> out;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const int32_t id = match_name(text, at);
    if (id < 0) {
      ++at;
    } else if (kinds_[id] == Kind::kSpecial && !allow_special) {
      at += tokens_[id].size();  // no other name is looked for inside
    } else {
      encode_stretch(text.substr(begin, at - begin), out);
      out.push_back(id);
      begin = at += tokens_[id].size();
    }
  }
  encode_stretch(text.substr(begin), out);
  return out;
}

void Spm::encode_stretch(std::string_view text, std::vector<int32_t>& out) const {
  if (text.empty()) return;
  std::string spaced;
  spaced.reserve(text.size() + text.size() / 2 + 3);
  if (space_prefix_) spaced += kMeta;
  for (char byte : text) {
    if (byte == ' ') {
      spaced += kMeta;
    } else {
      spaced += byte;
    }
  }
  std::vector<Symbol> symbols;
  split_characters(spaced, symbols);
  merge_all(symbols);
  for (const Symbol& symbol : symbols) {
    if (symbol.id >= 0) out.push_back(symbol.id);
  }
}

// One symbol per character that is a token, else one per byte, else one "unknown" for a run of such characters. That one
// comes before the next character that is a token, behind any bytes in between: the published tokenizers do so.
void Spm::split_characters(std::string_view text, std::vector<Symbol>& symbols) const {
  symbols.reserve(text.size());
  const auto add = [&](int32_t id) {
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back(Symbol{id, at - 1, at + 1});
  };
  bool is_unknown_due = false;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    while (end < text.size() && !begins_character(text[end])) ++end;
    const std::string_view character = text.substr(at, end - at);
    at = end;
    if (const int32_t id = find(character); id >= 0) {
      if (is_unknown_due) add(unknown_);
      is_unknown_due = false;
      add(id);
    } else if (std::all_of(character.begin(), character.end(),
                           [&](char byte) { return bytes_[static_cast<uint8_t>(byte)] >= 0; })) {
      for (char byte : character) add(bytes_[static_cast<uint8_t>(byte)]);
    } else {
      is_unknown_due = unknown_ >= 0;
    }
  }
  if (is_unknown_due) add(unknown_);
  if (!symbols.empty()) symbols.back().next = -1;
}

// The order of merges: best score, then longest left part, then longest right part, then smallest id, then leftmost.
bool Spm::is_later(const Merge& a, const Merge& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.num_left != b.num_left) return a.num_left < b.num_left;
  if (a.num_right != b.num_right) return a.num_right < b.num_right;
  if (a.id != b.id) return a.id > b.id;
  return a.at > b.at;
}

// Merges until nothing can be merged; symbols that went into their left neighbour get id -1.
void Spm::merge_all(std::vector<Symbol>& symbols) const {
  std::vector<Merge> heap;
  heap.reserve(symbols.size());
  const auto offer = [&](int32_t at) {
    const int32_t left = symbols[at].id, right = symbols[symbols[at].next].id;
    const int32_t id = find_pair(left, right);
    if (id < 0) return false;
    heap.push_back(Merge{scores_[id], num_chars_[left], num_chars_[right], id, at});
    return true;
  };
  for (size_t at = 0; at + 1 < symbols.size(); ++at) offer(static_cast<int32_t>(at));
  std::make_heap(heap.begin(), heap.end(), is_later);
  const auto push = [&](int32_t at) {
    if (offer(at)) std::push_heap(heap.begin(), heap.end(), is_later);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_later);
    const Merge top = heap.back();
    heap.pop_back();
    Symbol& symbol = symbols[top.at];
    if (symbol.id < 0 || symbol.next < 0) continue;
    Symbol& right = symbols[symbol.next];
    // a neighbour may have changed since the offer; the same piece can only come of the same two parts
    if (tokens_[symbol.id].size() + tokens_[right.id].size() != tokens_[top.id].size() ||
        find_pair(symbol.id, right.id) != top.id) {
      continue;
    }
    symbol.id = top.id;
    right.id = -1;
    symbol.next = right.next;
    if (symbol.next >= 0) symbols[symbol.next].prev = top.at;
    if (symbol.prev >= 0) push(symbol.prev);
    if (symbol.next >= 0) push(top.at);
  }
}

}  // namespace trireme::text
