// How attention is divided among threads: which tokens of which heads are one piece of work. It
// depends on lengths alone, and needs neither PyTorch nor vectors. A test compiles this file by
// itself and counts the work of each of many threads.
//
// A piece is a sequence of up to TOGETHER heads. Threads take pieces one after the other, the
// longest first, so that a long sequence does not come last. No result depends on this order, nor
// on which heads share a piece.
//
// If the longest sequence has more tokens than a thread's share of all of them, threads would wait
// for it. Every sequence is then divided into parts of a fixed length too. The latents' states at
// the borders of parts are merged from the states of the parts, which changes the last digits
// (attention_parts.h). Therefore whether a call is split is one decision. Parts themselves depend
// on neither the number of threads nor the number of tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace latte {

constexpr int64_t TOKENS = 64;    // C: of a chunk, a multiple of every vector's width
constexpr int64_t SEGMENT = 256;  // tokens between two states that are kept, in whole chunks
constexpr int64_t TOGETHER = 4;   // heads of a sequence that are processed in turns
constexpr int64_t LONG = 1024;    // tokens from which taking turns saves more than its memory costs
constexpr int64_t PART = 1024;    // tokens of a part at least, in whole segments
// Fewer heads take turns only if this saves more than 1 / WORTH of the time.
constexpr int64_t WORTH = 16;

// Tokens from ... stop of some heads of a sequence.
struct Piece {
    int64_t sequence, head, heads, from, stop;
    bool last;  // of its sequence

    int64_t cost() const { return heads * (stop - from); }
};

// The tokens of each thread, if a thread takes the next piece whenever it has finished one.
inline std::vector<int64_t> shares(const std::vector<Piece>& pieces, int64_t threads) {
    std::vector<int64_t> tokens(static_cast<size_t>(threads));  // a heap, the smallest first
    for (const Piece& piece : pieces) {
        std::pop_heap(tokens.begin(), tokens.end(), std::greater<int64_t>());
        tokens.back() += piece.cost();
        std::push_heap(tokens.begin(), tokens.end(), std::greater<int64_t>());
    }
    return tokens;
}

struct Plan {
    bool split = false;         // long sequences are in parts
    int64_t part = 0;           // tokens of a part
    std::vector<Piece> pieces;  // the longest first

    Plan() = default;
    // The plan for sequences of these lengths, with up to `together` heads in turns.
    Plan(const std::vector<int64_t>& lengths, int64_t heads, int64_t together, int64_t window,
         int64_t threads) {
        int64_t total = 0, longest = 0;
        for (int64_t length : lengths) total += length, longest = std::max(longest, length);
        // A part is at least as long as the window, so that it reads keys of one other part alone.
        part = std::max(PART, std::min(window, longest));
        part = (part + SEGMENT - 1) / SEGMENT * SEGMENT;
        split = longest > part && threads * longest > total * heads;
        int64_t most = 0;
        for (together = std::min(together, heads); together; --together) {
            std::vector<Piece> found = divide(lengths, heads, together);
            const std::vector<int64_t> tokens = shares(found, threads);
            const int64_t now = *std::max_element(tokens.begin(), tokens.end());
            if (pieces.empty() || now + now / WORTH < most) pieces.swap(found), most = now;
            const int64_t share = (total * heads + threads - 1) / threads;
            if (share + share / WORTH >= most) break;  // no other division is worth more
        }
    }

private:
    std::vector<Piece> divide(const std::vector<int64_t>& lengths, int64_t heads,
                              int64_t together) const {
        std::vector<Piece> found;
        for (size_t n = 0; n < lengths.size(); ++n) {
            const int64_t length = lengths[n], each = split ? part : std::max(length, int64_t(1));
            for (int64_t from = 0; from == 0 || from < length; from += each)
                for (int64_t h = 0; h < heads; h += together) {
                    const int64_t stop = std::min(length, from + each);
                    found.push_back(
                        {int64_t(n), h, std::min(together, heads - h), from, stop, stop == length});
                }
        }
        std::stable_sort(found.begin(), found.end(),
                         [](const Piece& a, const Piece& b) { return a.cost() > b.cost(); });
        return found;
    }
};

}  // namespace latte
