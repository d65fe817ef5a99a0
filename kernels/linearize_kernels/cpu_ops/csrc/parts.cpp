// Sequences in parts: which there are, and the states between them.
#include "sums.h"

namespace lz {

Sequences sequences(i64 N, i64 T, const Tensor& cu, i64 heads, i64 threads, i64 shortest) {
    // Parts cost a pass over their keys before the work proper: whole sequences where those alone keep threads busy.
    i64 length = T;
    const i64 tasks = N * heads;
    const bool even = !cu && tasks % threads == 0;
    if (threads > 1 && !even && tasks < 4 * threads) {
        length = (T * (cu ? 1 : N) * heads + 4 * threads - 1) / (4 * threads);
        length = (most(length, shortest) + CHUNK - 1) / CHUNK * CHUNK;
    }
    Sequences all;
    all.begin.push_back(0);
    for (i64 n = 0; n < N; n++) {
        const i64 start = cu ? cu.integer(n) : 0, stop = cu ? cu.integer(n + 1) : T;
        i64 t = start;
        do {
            const i64 end = most(t, least(stop, t + length));
            all.parts.push_back({n, cu ? 0 : n, t, end, static_cast<i64>(all.parts.size()), t == start, end >= stop});
            t = end;
        } while (t < stop);
        all.begin.push_back(static_cast<i64>(all.parts.size()));
    }
    return all;
}

void walk(const Source& s, i64 b, i64 t0, i64 t1, i64 head, float& m, float* state, float* decay) {
    Gate gate(s.mode, s.gate, s.d);
    Tiles tiles(s.d, false);
    float *S = state, *z = state + s.d.F * s.d.Vp;
    for (i64 t = t0; t < t1;) {
        const i64 c = gate.open(b, t, t1 - t, head, m);
        tiles.read_keys(s, gate, b, t, c, head, false);
        gate.begin(S, z);
        chunk_fold(tiles, c, S, z);
        gate.finish(S, z);
        if (decay)
            for (i64 f = 0; f < s.d.F; f++) decay[f] *= gate.first_of(f) * gate.last_of(f);
        t += c;
    }
}

// to += from, both states, times a decay by feature.
static void add_decayed(const Dims& d, const float* decay, const float* from, float* to) {
    for (i64 f = 0; f < d.F; f++) axpy(decay[f], from + f * d.Vp, to + f * d.Vp, d.Vp);
    for (i64 f = 0; f < d.F; f++) to[d.F * d.Vp + f] += decay[f] * from[d.F * d.Vp + f];
}

bool find_starts(const Sequences& all, const Source& s, const Tensor& S, const Tensor& z, const Tensor& m, i64 heads,
                 i64 threads, Starts& out) {
    const i64 parts = static_cast<i64>(all.parts.size());
    const Dims& d = s.d;
    out.heads = heads;
    out.floats = d.state();
    out.states.reset(new float[parts * heads * out.floats]);
    out.m.resize(parts * heads);
    std::vector<float> decays(all.cut() ? parts * heads * d.Fp : 0, 1.0f);
    auto state = [&](i64 part, i64 head) { return &out.states[(part * heads + head) * out.floats]; };
    auto initial = [&](i64 task) {
        const i64 n = task / heads, head = task % heads;
        read_state(S, z, n, head, d, state(all.begin[n], head));
        float now = m.value(n, head);
        for (i64 i = all.begin[n]; i < all.begin[n + 1]; i++) {
            const Part& p = all.parts[i];
            out.m[i * heads + head] = now;
            for (i64 t = s.key(p.t0); s.mode == LOGS && !p.last && t < s.key(p.t1); t++)
                now = most(now, s.gate.value(p.b, t, head));
        }
    };
    if (!parallel(all.count() * heads, threads, initial)) return false;
    if (!all.cut()) return true;
    // What each part adds, from nothing, to the next part's place; then one after the other.
    auto local = [&](i64 task) {
        const Part& p = all.parts[task / heads];
        const i64 head = task % heads;
        if (p.last) return;
        float* to = state(p.index + 1, head);
        std::memset(to, 0, out.floats * sizeof(float));
        float top = out.m[p.index * heads + head];
        walk(s, p.b, s.key(p.t0), s.key(p.t1), head, top, to, &decays[task * d.Fp]);
    };
    if (!parallel(parts * heads, threads, local)) return false;
    auto carry = [&](i64 task) {
        const i64 head = task % heads;
        for (i64 i = all.begin[task / heads]; i + 1 < all.begin[task / heads + 1]; i++)
            add_decayed(d, &decays[(i * heads + head) * d.Fp], state(i, head), state(i + 1, head));
    };
    return parallel(all.count() * heads, threads, carry);
}

bool find_ends(const Sequences& all, const Source& s, const Starts& starts, const Tensor& dS, const Tensor& dz,
               const RowGrads& rows, i64 heads, i64 threads, std::unique_ptr<float[]>& ends) {
    const Dims& d = s.d;
    const i64 tasks = static_cast<i64>(all.parts.size()) * heads, floats = d.state();
    ends.reset(new float[tasks * floats]);
    std::vector<float> decays(all.cut() ? tasks * d.Fp : 0, 1.0f);
    auto local = [&](i64 task) {
        const Part& p = all.parts[task / heads];
        const i64 head = task % heads;
        if (p.last) read_state(dS, dz, p.n, head, d, &ends[task * floats]);
        if (p.first) return;
        // Chunks first to last: the decay up to each one's start is known by then.
        Gate gate(s.mode, s.gate, d);
        Tiles tiles(d, false);
        float *dN = arena().take(CHUNK * d.G * d.Vp), *dD = arena().take(CHUNK * d.G);
        float *to = &ends[(task - heads) * floats], *to_z = to + d.F * d.Vp, *decay = &decays[task * d.Fp];
        float m = starts.m[task];
        std::memset(to, 0, floats * sizeof(float));
        for (i64 t = s.key(p.t0); t < s.key(p.t1);) {
            const i64 c = gate.open(p.b, t, s.key(p.t1) - t, head, m);
            tiles.read_queries(s, gate, p.b, t + s.shift, c, head);
            rows(gate, p.b, t + s.shift, c, head, dN, dD);
            for (i64 r = 0; r < c * d.G; r++) {
                float* q = tiles.Q + r * d.Fp;
                for (i64 f = 0; f < d.F; f++) q[f] *= decay[f] * gate.first_of(f);
                axpy(dD[r], q, to_z, d.Fp);
            }
            gemm(d.F, d.Vp, c * d.G, tiles.Q, 1, d.Fp, dN, d.Vp, to, d.Vp, ADD);
            for (i64 f = 0; f < d.F; f++) decay[f] *= gate.first_of(f) * gate.last_of(f);
            t += c;
        }
    };
    if (!parallel(tasks, threads, local)) return false;
    if (!all.cut()) return true;
    auto carry = [&](i64 task) {
        const i64 n = task / heads, head = task % heads;
        for (i64 i = all.begin[n + 1] - 1; i > all.begin[n]; i--) {
            const i64 at = i * heads + head;
            add_decayed(d, &decays[at * d.Fp], &ends[at * floats], &ends[(at - heads) * floats]);
        }
    };
    return parallel(all.count() * heads, threads, carry);
}

bool DecayGrads::run(const Sequences& all, const Dims& d, Mode mode, i64 heads, i64 threads) const {
    const i64 width = mode == DECAYS ? d.F : 1;
    auto body = [&](i64 task) {
        const i64 n = task / heads, head = task % heads;
        std::vector<double> total(width, 0.0);
        std::vector<float> row(width);
        for (i64 f = 0; f < d.F; f++) {
            double& own = total[width == 1 ? 0 : f];
            for (i64 i = 0; i < d.Dv; i++)
                own += static_cast<double>(S.floats(n, head, f)[i]) * dS.floats(n, head, f)[i];
            if (z) own += static_cast<double>(z.value(n, head, f)) * dz.value(n, head, f);
        }
        for (i64 i = all.begin[n]; i < all.begin[n + 1]; i++) {
            const Part& p = all.parts[i];
            for (i64 t = p.t0; t < p.t1; t++) {
                const float* here = sums.floats(p.b, t, head);
                for (i64 f = 0; f < width; f++) {
                    row[f] = static_cast<float>(total[f]);
                    total[f] -= here[f];
                }
                write_row(row.data(), to.at(p.b, t, head), to.dtype, width);
            }
        }
    };
    return parallel(all.count() * heads, threads, body);
}

Advance fold_keys(const Source& s, i64 b, i64 head) {
    const Tiles tiles(s.d, false);
    return [&s, b, head, tiles](const Gate& gate, i64 t, i64 c, float* state) {
        float *S = state, *z = state + s.d.F * s.d.Vp;
        Tiles(tiles).read_keys(s, gate, b, t, c, head, false);
        gate.begin(S, z);
        chunk_fold(tiles, c, S, z);
        gate.finish(S, z);
    };
}

Reverse::Reverse(Advance advance, Gate& gate, i64 b, i64 t0, i64 t1, i64 head, float m, const float* state)
    : advance_(std::move(advance)), gate_(gate), b_(b), head_(head), floats_(gate.d.state()), held_group_(-1) {
    for (i64 t = t0; t < t1;) {
        const float before = m;
        const i64 c = gate.open(b, t, t1 - t, head, m);
        chunks_.push_back({t, c, before});
        t += c;
    }
    at_ = static_cast<i64>(chunks_.size());
    group_ = most(GROUP, static_cast<i64>(std::sqrt(static_cast<double>(at_))));
    held_ = arena().take(least(group_, most<i64>(at_, 1)) * floats_);
    const i64 groups = most<i64>((at_ + group_ - 1) / group_, 1);
    anchors_.resize(groups * floats_);
    std::memcpy(anchors_.data(), state, floats_ * sizeof(float));
    for (i64 g = 0; g + 1 < groups; g++) {
        float* to = &anchors_[(g + 1) * floats_];
        std::memcpy(to, to - floats_, floats_ * sizeof(float));
        for (i64 i = g * group_; i < (g + 1) * group_; i++) move(chunks_[i], to);
    }
}

void Reverse::move(const Chunk& chunk, float* state) {
    float m = chunk.m;
    gate_.open(b_, chunk.t, chunk.c, head_, m);
    advance_(gate_, chunk.t, chunk.c, state);
}

bool Reverse::next(Chunk& chunk, const float*& state) {
    if (!at_) return false;
    at_--;
    const i64 group = at_ / group_, begin = group * group_;
    if (group != held_group_) {
        std::memcpy(held_, &anchors_[group * floats_], floats_ * sizeof(float));
        for (i64 i = begin; i < at_; i++) {
            float* to = held_ + (i + 1 - begin) * floats_;
            std::memcpy(to, to - floats_, floats_ * sizeof(float));
            move(chunks_[i], to);
        }
        held_group_ = group;
    }
    chunk = chunks_[at_];
    state = held_ + (at_ - begin) * floats_;
    return true;
}

}  // namespace lz
