// Blocks of threads on one CPU thread: every thread is a fiber, and time is virtual.
//
// A fiber runs until it has to wait: for its warp, for a barrier, for a while. Then another one runs. Computing takes
// no time; the clock goes on to the next event (the end of a sleep, a copy that lands) when nobody can run. Which warp
// and which lane go next, how long copies take and who is held up follow from a seed; with seed 0 everything is in
// order. A meeting that somebody does not come to ends the program with a list of who waits for what.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

namespace fibers {

inline constexpr size_t kStack = 48 * 1024 + 448;  // no power of two, or all stacks share the same sets of a cache
inline constexpr size_t kSlotBytes = 32;

struct Warp;

struct Fiber {
    jmp_buf context;
    Warp* warp;
    int lane;
    bool parked = false;
    bool ended = false;
    uint64_t parks = 0;  // so that an event finds out that it comes too late
    const char* waits = "";
    const void* at = nullptr;
};

// A barrier in shared memory.
struct Barrier {
    int arrivals = 0, pending = 0;
    int64_t bytes = 0;  // of copies that the phase waits for
    uint64_t phase = 0;
    std::vector<std::pair<Fiber*, uint64_t>> waiters;  // with their parks
    bool planted = false;                              // nobody waits for it
};

// A named barrier of a block's threads.
struct Team {
    std::vector<Fiber*> waiting;
    uint64_t number = 0;
    bool all[2];
};

struct Block {
    int number;
    std::vector<Warp> warps;
    std::unique_ptr<unsigned char[]> owner;
    unsigned char* memory = nullptr;  // aligned
    size_t bytes = 0;
    std::unordered_map<const void*, Barrier> barriers;
    Team teams[16];
    int running = 0;  // fibers that have not ended
    int copies = 0;   // on their way
};

struct Warp {
    Block* block;
    int number;
    Fiber fibers[32];
    uint32_t ready = 0;  // lanes that may run
    bool queued = false;
    uint32_t arrived = 0;  // lanes at the meeting
    uint64_t meetings = 0;
    const char* kind = "";
    alignas(16) unsigned char slots[2][32][kSlotBytes];  // what lanes give to their warp, by parity of the meeting
};

struct Copy {
    Block* block;
    const void* barrier;
    unsigned char* to;
    const void* from;
    std::vector<unsigned char> bytes;  // read when it began, or empty
    int size;
};

// Words that others see some time after they were stored.
struct Store {
    Block* block;
    uint32_t* to;
    std::vector<uint32_t> words;
};

struct Event {
    uint64_t time, number;
    Fiber* fiber;
    uint64_t parks;
    Copy* copy;
    uint64_t store;  // its number; 0: none
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : number > other.number; }
};

struct Machine {
    ucontext_t main;
    jmp_buf end;
    std::vector<std::unique_ptr<Block>> blocks;
    std::unique_ptr<char[]> stacks;
    std::function<void()> body;
    std::deque<Warp*> queue;
    Warp* warp = nullptr;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    std::map<uint64_t, Store> stores;  // that nobody sees yet, in order
    uint64_t now = 1, events_made = 0, stores_made = 0;
    int running = 0;  // fibers
};
inline Machine* machine = nullptr;
inline Fiber* current = nullptr;

// Who looks at what orders the fibers' accesses, if anybody (races.cc). What `current` does, unless fibers are given.
struct Observer {
    virtual ~Observer() = default;
    virtual void begin() = 0;                                  // of a run, when all fibers are there
    virtual void meet(const std::vector<Fiber*>& fibers) = 0;  // come together
    virtual void release(const void* word) = 0;                // in global memory
    virtual void acquire(const void* word) = 0;
    virtual void arrive(const Barrier& barrier) = 0;
    virtual void complete(const Barrier& barrier) = 0;  // a phase
    virtual void see(const Barrier& barrier) = 0;       // that a phase is complete
    virtual void fence() = 0;                           // before bulk copies to what was written
    virtual void copy(const unsigned char* to, int size, const Barrier& barrier) = 0;
};
inline Observer* observer = nullptr;
inline bool in_atomic = false;  // what is read and written is one operation

// What a program chooses.
inline uint64_t seed = 0;
inline uint64_t limit_ns = UINT64_MAX;                     // of virtual time
inline std::function<std::string(int warp)> name_of_warp;  // for reports
inline std::function<std::string(const Block&, const void*)> name_of_place;
inline std::string planted;  // mistake: waits at barriers of this name are left out ("fence": the fence before copies)

inline uint64_t random_state = 0;
inline uint64_t random(uint64_t below) {
    if (seed == 0) return below - 1;
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (random_state >> 20) % below;
}
// One time in n, none with seed 0.
inline bool chance(uint64_t n) { return seed != 0 && random(n) == 0; }

[[noreturn]] inline void fail(const std::string& why) {
    std::fprintf(stderr, "%s, at %llu ns\n", why.c_str(), static_cast<unsigned long long>(machine->now));
    for (const auto& block : machine->blocks) {
        for (const Warp& warp : block->warps) {
            std::vector<std::pair<std::string, int>> places;  // with the number of lanes there
            for (const Fiber& fiber : warp.fibers) {
                if (fiber.ended || !fiber.parked) continue;
                std::string place = fiber.waits;
                if (fiber.at != nullptr && name_of_place) place += " " + name_of_place(*block, fiber.at);
                if (places.empty() || places.back().first != place) places.push_back({place, 0});
                ++places.back().second;
            }
            for (const auto& [place, lanes] : places) {
                const std::string name = name_of_warp ? name_of_warp(warp.number) : "";
                std::fprintf(stderr, "  block %d warp %d %s: %d lanes wait for %s\n", block->number, warp.number,
                             name.c_str(), lanes, place.c_str());
            }
        }
    }
    std::fflush(stderr);
    std::_Exit(3);
}

inline void require(bool holds, const char* otherwise) {
    if (!holds) fail(otherwise);
}

inline void enqueue(Warp* warp) {
    if (warp == machine->warp || warp->queued) return;
    warp->queued = true;
    machine->queue.push_back(warp);
}

inline void wake(Fiber* fiber) {
    if (!fiber->parked) return;
    fiber->parked = false;
    fiber->warp->ready |= 1u << fiber->lane;
    enqueue(fiber->warp);
}

inline void land(Copy* copy);
inline void show(uint64_t store);

// The fiber that runs next.
inline Fiber* next() {
    Machine& m = *machine;
    for (;;) {
        if (Warp* warp = m.warp; warp != nullptr && warp->ready != 0) {
            if (!chance(256)) {
                const int from = seed == 0 ? 0 : static_cast<int>(random(32));
                const uint32_t turned = from == 0 ? warp->ready : warp->ready >> from | warp->ready << (32 - from);
                const int lane = (__builtin_ctz(turned) + from) % 32;
                warp->ready &= ~(1u << lane);
                return &warp->fibers[lane];
            }
            m.warp = nullptr;
            enqueue(warp);
        }
        m.warp = nullptr;
        if (!m.queue.empty()) {
            if (seed != 0) std::swap(m.queue.front(), m.queue[random(m.queue.size())]);
            m.warp = m.queue.front();
            m.warp->queued = false;
            m.queue.pop_front();
            continue;
        }
        if (m.events.empty()) fail("threads wait for others that do not come");
        const Event event = m.events.top();
        m.events.pop();
        m.now = event.time;
        if (m.now > limit_ns) fail("this takes too long");
        if (event.copy != nullptr) {
            land(event.copy);
        } else if (event.store != 0) {
            show(event.store);
        } else if (event.fiber->parks == event.parks) {
            wake(event.fiber);
        }
    }
}

// A function of its own, so that no local variable lives across the change of stacks.
[[gnu::noinline]] inline void run_next(Fiber* self) {
    Fiber* to = next();
    if (to == self) return;
    current = to;
    if (_setjmp(self->context) == 0) _longjmp(to->context, 1);
}

// Until somebody wakes this fiber.
inline void park(const char* why, const void* at = nullptr) {
    Fiber* self = current;
    self->waits = why;
    self->at = at;
    self->parked = true;
    ++self->parks;
    run_next(self);
}

inline void add_event(uint64_t after, Fiber* fiber, uint64_t parks, Copy* copy) {
    machine->events.push({machine->now + after, machine->events_made++, fiber, parks, copy, 0});
}

// Stores words without order: others may see them later than what is done next.
inline void store_late(uint32_t* to, std::vector<uint32_t> words) {
    Machine& m = *machine;
    const uint64_t number = ++m.stores_made;
    m.stores.emplace(number, Store{current->warp->block, to, std::move(words)});
    const uint64_t after = 1 + random(chance(16) ? 5000 : 300);
    m.events.push({m.now + after, m.events_made++, nullptr, 0, nullptr, number});
}

inline void show(uint64_t number) {
    const auto found = machine->stores.find(number);
    if (found == machine->stores.end()) return;  // a release came first
    std::memcpy(found->second.to, found->second.words.data(), found->second.words.size() * sizeof(uint32_t));
    machine->stores.erase(found);
}

// What this block has stored is seen before what comes next.
inline void release() {
    auto& stores = machine->stores;
    for (auto i = stores.begin(); i != stores.end();) {
        const auto number = i++->first;
        if (stores.at(number).block == current->warp->block) show(number);
    }
}

inline void sleep(uint64_t ns) {
    add_event(1 + random(ns), current, current->parks + 1, nullptr);
    park("a while");
}

inline constexpr const char* kSyncWarp = "syncwarp";

// The lanes of a warp come together; the number of the meeting.
inline uint64_t meet_warp(const char* kind) {
    Fiber* self = current;
    Warp& warp = *self->warp;
    const uint64_t number = warp.meetings;
    if (warp.arrived == 0) warp.kind = kind;
    if (warp.kind != kind) fail(std::string("lanes of a warp go different ways: ") + warp.kind + " and " + kind);
    warp.arrived |= 1u << self->lane;
    if (warp.arrived == ~0u) {
        warp.arrived = 0;
        ++warp.meetings;
        if (observer != nullptr && std::strcmp(kind, kSyncWarp) == 0) {  // other exchanges order no memory
            std::vector<Fiber*> all;
            for (Fiber& fiber : warp.fibers) all.push_back(&fiber);
            observer->meet(all);
        }
        for (Fiber& fiber : warp.fibers) wake(&fiber);
        if (chance(512)) sleep(2000);  // this warp is late
    } else {
        park(kind);
    }
    return number;
}

// Threads of a block come together; whether all say so.
inline bool meet_team(int barrier, int threads, bool value) {
    if (planted == "team " + std::to_string(barrier)) return value;
    Team& team = current->warp->block->teams[barrier];
    bool& all = team.all[team.number % 2];
    all = (team.waiting.empty() || all) && value;
    if (static_cast<int>(team.waiting.size()) + 1 == threads) {
        ++team.number;
        for (Fiber* fiber : team.waiting) wake(fiber);
        if (observer != nullptr) {
            team.waiting.push_back(current);
            observer->meet(team.waiting);
        }
        team.waiting.clear();
    } else {
        team.waiting.push_back(current);
        park("its team");
    }
    return all;
}

inline Barrier& barrier_at(const void* at) {
    auto& all = current->warp->block->barriers;
    const auto found = all.find(at);
    require(found != all.end(), "a barrier that nobody has initialised");
    return found->second;
}

inline void complete(Barrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    if (observer != nullptr) observer->complete(barrier);
    const auto waiters = std::move(barrier.waiters);
    barrier.waiters.clear();
    for (const auto& [fiber, parks] : waiters) {
        if (fiber->parks == parks) wake(fiber);
    }
}

inline void arrive(const void* at, int64_t bytes) {
    Barrier& barrier = barrier_at(at);
    require(barrier.pending > 0, "more arrivals at a barrier than it is for");
    --barrier.pending;
    barrier.bytes += bytes;
    if (observer != nullptr) observer->arrive(barrier);
    complete(barrier);
}

// Whether the phase of a parity is complete, after waiting for it for a while as the hardware does.
inline bool test(const void* at, uint32_t parity) {
    Barrier& barrier = barrier_at(at);
    if (barrier.planted) return true;
    const auto complete = [&] {
        const bool done = (barrier.phase & 1) != parity;
        if (done && observer != nullptr) observer->see(barrier);
        return done;
    };
    if (complete()) return true;
    barrier.waiters.push_back({current, current->parks + 1});
    add_event(1000 + random(1000), current, current->parks + 1, nullptr);
    park(parity == 0 ? "phase 0 of" : "phase 1 of", at);
    return complete();
}

// Until a copy lands, what was there is gone and what comes is not there: both read as NaN. What it copies may be
// what is there when it begins or when it ends.
inline void begin_copy(unsigned char* to, const void* from, int size, const void* barrier) {
    Block& block = *current->warp->block;
    Barrier& counted = barrier_at(barrier);
    require(size > 0 && size % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && (to - block.memory) % 16 == 0,
            "a bulk copy that is not aligned");
    require(to >= block.memory && to + size <= block.memory + block.bytes, "a bulk copy beyond the block's memory");
    if (observer != nullptr) observer->copy(to, size, counted);
    auto* copy = new Copy{&block, barrier, to, from, {}, size};
    if (seed == 0 || random(2) == 0) {
        const auto* bytes = static_cast<const unsigned char*>(from);
        copy->bytes.assign(bytes, bytes + size);
    }
    std::memset(to, 0xff, size);
    ++block.copies;
    const bool late = seed % 4 == 3 || chance(16);  // every fourth seed: all of them may be
    add_event(1 + random(late ? 20000 : 300), nullptr, 0, copy);
}

inline void land(Copy* copy) {
    std::memcpy(copy->to, copy->bytes.empty() ? copy->from : copy->bytes.data(), copy->size);
    --copy->block->copies;
    Barrier& barrier = copy->block->barriers.at(copy->barrier);
    barrier.bytes -= copy->size;
    complete(barrier);
    delete copy;
}

inline void enter() {
    Fiber* self = current;
    if (_setjmp(self->context) == 0) setcontext(&machine->main);
    machine->body();
    self = current;
    self->ended = true;
    Block& block = *self->warp->block;
    if (--block.running == 0) require(block.copies == 0, "a block ends while copies are on their way");
    if (--machine->running == 0) _longjmp(machine->end, 1);
    run_next(self);
}

// Runs body() as every thread of `blocks` blocks with `bytes` bytes of shared memory; gives the time that it takes.
inline uint64_t run(int blocks, int threads, size_t bytes, std::function<void()> body) {
    Machine own;
    machine = &own;
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    own.body = std::move(body);
    own.running = blocks * threads;
    own.stacks.reset(new char[own.running * kStack]);
    char* stack = own.stacks.get();
    for (int b = 0; b < blocks; ++b) {
        Block& block = *own.blocks.emplace_back(std::make_unique<Block>());
        block.number = b;
        block.running = threads;
        block.bytes = bytes;
        block.owner.reset(new unsigned char[bytes + 128]);
        block.memory = block.owner.get() + (128 - reinterpret_cast<uintptr_t>(block.owner.get()) % 128);
        std::memset(block.memory, 0xff, bytes);
        block.warps = std::vector<Warp>(threads / 32);
        for (int w = 0; w < threads / 32; ++w) {
            Warp& warp = block.warps[w];
            warp.block = &block;
            warp.number = w;
            for (int lane = 0; lane < 32; ++lane) {
                Fiber& fiber = warp.fibers[lane];
                fiber.warp = &warp;
                fiber.lane = lane;
                ucontext_t start;
                getcontext(&start);
                start.uc_stack.ss_sp = stack;
                start.uc_stack.ss_size = kStack;
                stack += kStack;
                makecontext(&start, enter, 0);
                current = &fiber;
                swapcontext(&own.main, &start);
                fiber.parked = true;
                wake(&fiber);
            }
        }
    }
    if (observer != nullptr) observer->begin();
    if (_setjmp(own.end) == 0) {
        current = next();
        _longjmp(current->context, 1);
    }
    machine = nullptr;
    return own.now;
}

// Every lane gives a value; each then sees all of them.
template <class T, class Use>
auto exchange(const char* kind, const T& value, Use use) {
    static_assert(sizeof(T) <= kSlotBytes);
    Warp& warp = *current->warp;
    std::memcpy(warp.slots[warp.meetings % 2][current->lane], &value, sizeof(T));
    const uint64_t number = meet_warp(kind);
    return use([&](int from) {
        T other;
        std::memcpy(&other, warp.slots[number % 2][from], sizeof(T));
        return other;
    });
}

inline int lane() { return current->lane; }
inline unsigned char* memory_at(uint32_t address) {
    Block& block = *current->warp->block;
    require(address < block.bytes, "an address beyond the block's memory");
    return block.memory + address;
}

}  // namespace fibers
