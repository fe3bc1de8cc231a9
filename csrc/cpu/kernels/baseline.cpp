// The CPU kernels for any processor the compiler can target.
#include <cstdint>
#include <cstring>

#include "cpu/kernels/convert.h"
#include "cpu/kernels/kernels.h"
#include "math/axpby.h"
#include "math/check.h"
#include "math/codes.h"
#include "math/exponent.h"
#include "math/rounding.h"
#include "math/rules.h"
#include "math/split.h"
#include "math/unscale.h"

#define APEX_MP_LEVEL 0

namespace apex_mp::cpu::baseline {
namespace {
#include "cpu/kernels/impl.h"
}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = table("baseline", math::AllRules{});

}  // namespace apex_mp::cpu::baseline
