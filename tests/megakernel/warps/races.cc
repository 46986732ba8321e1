// Races on shared memory between the fibers of a kernel, found from what orders their accesses and not from what
// happened: linked with a program that is compiled with -fsanitize=thread, whose calls come here and not to the
// ThreadSanitizer, which knows no fibers.
//
// Every lane has a clock: which accesses of every other lane come before what it does next (a vector clock). Clocks are
// joined where lanes meet (__syncwarp, named barriers), pass through mbarriers, phase by phase, and through words in
// global memory that are written with release and read with acquire. A bulk copy is an access by nobody: it comes after
// what its issuer knew, and before what sees its barrier's phase complete. What a thread wrote comes before a copy only
// with a proxy fence on the way, so a second clock says what is known through one. Volatile accesses are meant to race.
//
// The first race ends the program with status 8 and two lines: the region of memory, who accessed it, and how.
#include <algorithm>

#include "fibers.h"

namespace {

using fibers::Barrier;
using fibers::Fiber;

using Clock = std::vector<uint32_t>;  // by agent: the lanes of all blocks, then barriers as those who copy

void join(Clock& to, const Clock& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

struct Knowledge {
    Clock seen;
    Clock fenced;  // what comes before bulk copies, too

    explicit Knowledge(size_t agents) : seen(agents), fenced(agents) {}
    void add(const Knowledge& other) {
        join(seen, other.seen);
        join(fenced, other.fenced);
    }
};
using Shared = std::shared_ptr<const Knowledge>;  // by lanes that know the same of others

struct Lane {
    Shared others;
    uint32_t time = 1;  // its own
};

enum class Kind : uint8_t { kRead, kWrite, kAtomic, kCopy };
constexpr const char* kDone[] = {"read", "written", "changed atomically", "copied to"};

struct Access {
    uint32_t agent = 0, time = 0;  // 0: none
    Kind kind = Kind::kRead;
    const void* code = nullptr;
};

// Of one byte: the last write, and the reads since then that do not come before one another.
struct Cell {
    Access write, read;
    std::unique_ptr<std::vector<Access>> more;
};

class Races : public fibers::Observer {
   public:
    Races() { fibers::observer = this; }

    void begin() override {
        const auto& blocks = fibers::machine->blocks;
        lanes_of_block_ = blocks[0]->warps.size() * 32;
        lanes_ = blocks.size() * lanes_of_block_;
        agents_ = lanes_ + kMostCopying;
        known_.assign(lanes_, {std::make_shared<Knowledge>(agents_)});
        for (const auto& block : blocks) cells_.emplace_back(block->bytes);
    }

    void meet(const std::vector<Fiber*>& fibers) override {
        auto all = std::make_shared<Knowledge>(agents_);
        Shared last;
        for (const Fiber* fiber : fibers) {
            const Lane& lane = known_[number_of(*fiber)];
            if (lane.others != last) all->add(*lane.others);
            last = lane.others;
        }
        for (const Fiber* fiber : fibers) {
            const uint32_t number = number_of(*fiber);
            all->seen[number] = known_[number].time++;
        }
        for (const Fiber* fiber : fibers) known_[number_of(*fiber)].others = all;
    }

    void release(const void* word) override { tell(words_.try_emplace(word, agents_).first->second); }
    void acquire(const void* word) override {
        if (const auto found = words_.find(word); found != words_.end()) learn(found->second);
    }

    void arrive(const Barrier& barrier) override { tell(phases_of(barrier).arrived); }
    void complete(const Barrier& barrier) override {
        Phases& phases = phases_of(barrier);
        phases.completed = phases.arrived;
        if (phases.copying != 0) phases.completed.seen[phases.copying] = static_cast<uint32_t>(barrier.phase);
        learned_.reset();
    }
    void see(const Barrier& barrier) override {
        const Knowledge& completed = phases_of(barrier).completed;
        // Lanes of a warp that knew the same now know the same again.
        if (learned_ == nullptr || learned_from_ != &completed || learned_before_ != own().others) {
            learned_before_ = own().others;
            learned_from_ = &completed;
            learn(completed);
            learned_ = own().others;
        } else {
            own().others = learned_;
        }
    }

    void fence() override {
        auto all = std::make_shared<Knowledge>(*own().others);
        all->seen[self()] = own().time++;
        all->fenced = all->seen;
        own().others = all;
    }

    void copy(const unsigned char* to, int size, const Barrier& barrier) override {
        Phases& phases = phases_of(barrier);
        if (phases.copying == 0) {
            fibers::require(copying_ < kMostCopying, "too many barriers that copies count at");
            phases.copying = static_cast<uint32_t>(lanes_ + copying_++);
        }
        const auto time = static_cast<uint32_t>(barrier.phase + 1);
        access(to, size, {phases.copying, time, Kind::kCopy, __builtin_return_address(0)});
    }

    // By the lane that runs, of memory anywhere.
    void access(const void* at, size_t size, bool writes, const void* code) {
        if (fibers::current == nullptr || fibers::machine == nullptr || cells_.empty()) return;
        const fibers::Block& block = *fibers::current->warp->block;
        const auto* first = static_cast<const unsigned char*>(at);
        if (first < block.memory || first >= block.memory + block.bytes) return;
        const Kind kind = fibers::in_atomic ? Kind::kAtomic : writes ? Kind::kWrite : Kind::kRead;
        access(first, size, {self(), own().time, kind, code});
    }

   private:
    static constexpr size_t kMostCopying = 256;

    struct Phases {
        Knowledge arrived, completed;
        uint32_t copying = 0;  // the agent that copies

        explicit Phases(size_t agents) : arrived(agents), completed(agents) {}
    };

    uint32_t number_of(const Fiber& fiber) const {
        return static_cast<uint32_t>(fiber.warp->block->number * lanes_of_block_ + fiber.warp->number * 32 +
                                     fiber.lane);
    }
    uint32_t self() const { return number_of(*fibers::current); }
    Lane& own() { return known_[self()]; }
    Phases& phases_of(const Barrier& barrier) { return phases_.try_emplace(&barrier, agents_).first->second; }

    // What this lane has done and knows, to whoever learns of `to`.
    void tell(Knowledge& to) {
        to.add(*own().others);
        to.seen[self()] = own().time++;
    }
    void learn(const Knowledge& from) {
        auto all = std::make_shared<Knowledge>(*own().others);
        all->add(from);
        own().others = all;
    }

    bool before(const Access& earlier) {
        return earlier.agent == self() || earlier.time <= own().others->seen[earlier.agent];
    }
    bool before_copies(const Access& earlier) { return earlier.time <= own().others->fenced[earlier.agent]; }

    // Atomic operations; and one instruction of a warp, whose lanes may write to one place: one of the values stays.
    bool belong_together(const Access& one, const Access& other) const {
        if (one.kind == Kind::kAtomic) return other.kind == Kind::kAtomic;
        return one.kind == Kind::kWrite && other.kind == Kind::kWrite && one.code == other.code &&
               one.agent / 32 == other.agent / 32;
    }

    void remember(Cell& cell, const Access& read) {
        if (before(cell.read)) {
            cell.read = read;
            return;
        }
        if (cell.more == nullptr) cell.more = std::make_unique<std::vector<Access>>();
        for (Access& other : *cell.more) {
            if (!before(other)) continue;
            other = read;
            return;
        }
        cell.more->push_back(read);
    }

    void access(const unsigned char* first, size_t size, const Access& now) {
        const fibers::Block& block = *fibers::current->warp->block;
        for (const unsigned char* at = first; at < first + size; ++at) {
            Cell& cell = cells_[block.number][at - block.memory];
            if (!before(cell.write) && !belong_together(cell.write, now)) report(block, at, cell.write, now, "");
            if (now.kind == Kind::kRead) {
                remember(cell, now);
                continue;
            }
            if (!before(cell.read)) report(block, at, cell.read, now, "");
            for (const Access& read : cell.more != nullptr ? *cell.more : std::vector<Access>()) {
                if (!before(read)) report(block, at, read, now, "");
            }
            const Access& write = cell.write;
            if (now.kind == Kind::kCopy && write.kind != Kind::kCopy && write.time != 0 && !before_copies(write)) {
                report(block, at, write, now, ", without a proxy fence");
            }
            cell.write = now;
            cell.read = {};
            cell.more.reset();
        }
    }

    std::string by(const Access& access) const {
        if (access.agent >= lanes_) return "by a bulk copy";
        const int thread = static_cast<int>(access.agent % lanes_of_block_);
        return "by " + fibers::name_of_warp(thread / 32) + " thread " + std::to_string(thread);
    }

    [[noreturn]] void report(const fibers::Block& block, const unsigned char* at, const Access& first,
                             const Access& second, const char* how) {
        extern const char base asm("__executable_start");
        const auto place = [&](const Access& access) {
            return static_cast<unsigned long>(static_cast<const char*>(access.code) - &base);
        };
        const char *one = kDone[static_cast<int>(first.kind)], *other = kDone[static_cast<int>(second.kind)];
        std::fprintf(stderr, "race in %s of block %d: %s %s (at %lx)\n  and %s %s (at %lx)%s\n",
                     fibers::name_of_place(block, at).c_str(), block.number, one, by(first).c_str(), place(first),
                     other, by(second).c_str(), place(second), how);
        std::_Exit(8);
    }

    size_t lanes_of_block_ = 0, lanes_ = 0, agents_ = 0, copying_ = 0;
    std::vector<Lane> known_;
    std::unordered_map<const void*, Knowledge> words_;
    std::unordered_map<const Barrier*, Phases> phases_;
    std::vector<std::vector<Cell>> cells_;     // by block and byte
    const Knowledge* learned_from_ = nullptr;  // at the last barrier: what a lane that knew this before knew then
    Shared learned_before_, learned_;
};

Races races;
bool busy = false;  // a function of the library that both sides share may be compiled with such calls

void accessed(const void* at, size_t size, bool writes, const void* code) {
    if (busy) return;
    busy = true;
    races.access(at, size, writes, code);
    busy = false;
}

}  // namespace

extern "C" {

#define ACCESSES(size)                                                                           \
    void __tsan_read##size(void* at) { accessed(at, size, false, __builtin_return_address(0)); } \
    void __tsan_write##size(void* at) { accessed(at, size, true, __builtin_return_address(0)); } \
    void __tsan_volatile_read##size(void*) {}                                                    \
    void __tsan_volatile_write##size(void*) {}                                                   \
    void __tsan_unaligned_read##size(void* at) { __tsan_read##size(at); }                        \
    void __tsan_unaligned_write##size(void* at) { __tsan_write##size(at); }                      \
    void __tsan_unaligned_volatile_read##size(void*) {}                                          \
    void __tsan_unaligned_volatile_write##size(void*) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* at, size_t size) { accessed(at, size, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t size) { accessed(at, size, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
