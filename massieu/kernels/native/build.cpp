// One build of the kernels, for one instruction set; dispatch.cpp picks among the builds at run time.
#include "backward.h"
#include "builds.h"
#include "count.h"
#include "retrieve.h"

namespace massieu {
namespace MASSIEU_BUILD {

// Calls a pass with the element type of the inputs.
template <class Pass>
int64_t by_type(const Rows& rows, const Pass& pass) {
    switch (rows.type) {
        case FLOAT32:
            return pass(float());
        case BFLOAT16:
            return pass(bfloat16());
        case FLOAT64:
            return pass(double());
        default:
            return BAD_ARGUMENT;
    }
}

static int64_t forward(const Forward& call) {
    return by_type(call.rows, [&](auto input) { return forward_of<decltype(input)>(call); });
}
static int64_t backward(const Backward& call) {
    return by_type(call.rows, [&](auto input) { return backward_of<decltype(input)>(call); });
}
static int64_t count(const Count& call) {
    return by_type(call.rows, [&](auto input) { return count_of<decltype(input)>(call); });
}
static int64_t retrieve(const Forward& call) {
    return by_type(call.rows, [&](auto input) { return retrieve_of<decltype(input)>(call); });
}

}  // namespace MASSIEU_BUILD

#define MASSIEU_TEXT_(name) #name
#define MASSIEU_TEXT(name) MASSIEU_TEXT_(name)

const Build builds::MASSIEU_BUILD = {MASSIEU_TEXT(MASSIEU_BUILD), MASSIEU_BUILD::forward, MASSIEU_BUILD::backward,
                                     MASSIEU_BUILD::count, MASSIEU_BUILD::retrieve};

}  // namespace massieu
